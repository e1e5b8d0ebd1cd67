// memory.h: registered memory and remote keys. Memory that peers may touch is registered once for our own requests, and once for each set of
// rights and each strict range that a key was made for: the device looks at nothing else when a request lands. Revoking replaces the latter
// alone, so our own transfers out of that memory go on: no call of the library takes the remote rights of a registration away and leaves its
// local ones to requests that are under way.
// The registry registers everything again when a failed device is open again. Then each key has another number, which peers ask for by the
// key's id: random, so whoever knows it was given the key. Control thread, and the service thread where that is noted, and any thread
// for keys; the data path only reads finished values.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "provider/provider.h"
#include "providers/verbs/device/device.h"

namespace asyncfabric::verbs {

class Registry;

// What one key reaches.
struct Exposed {
  KeyScope scope;
  uint64_t id = 0;   // of the key
  Owned<ibv_mr> mr;  // none: no remote rights, or the device has failed
};

class Registration final : public LocalMemory {
 public:
  Registration(std::shared_ptr<Registry> registry, const Memory& memory)
      : registry_(std::move(registry)), memory_(memory) {}
  ~Registration() override;

  uint32_t lkey() const { return local_->lkey; }
  bool on_host() const { return memory_.device == kHostDevice; }
  bool contains(const void* address, uint64_t length) const {
    const auto offset = reinterpret_cast<uint64_t>(address) - reinterpret_cast<uint64_t>(memory_.base);
    return offset <= memory_.length && length <= memory_.length - offset;
  }

 private:
  friend class Registry;

  const std::shared_ptr<Registry> registry_;  // outlives the registrations, and with it the device
  const Memory memory_;
  Owned<ibv_mr> local_;
  std::map<KeyScope, Exposed> exposed_;  // the widest is always there
};

class Registry : public std::enable_shared_from_this<Registry> {
 public:
  Registry(std::shared_ptr<const Device> device, uint64_t incarnation)
      : device_(std::move(device)), incarnation_(incarnation) {}

  // While the device has failed these make and drop nothing in it, and succeed.
  Status add(const Memory& memory, std::unique_ptr<Registration>* out, std::string* key);
  Status narrow(Registration& registration, const KeyScope& scope, std::string* key);
  Status renew(Registration& registration, std::string* key);  // a new key; the old ones are dead on return
  Status close(Registration& registration);                    // nothing touches the memory any more on return
  void forget(Registration& registration);

  uint64_t incarnation() const { return incarnation_; }

  // Service thread.
  void close_all();                // before the device goes
  Status open_all(uint32_t life);  // it is open again
  // The number that the key of this id has now; false: there is no such key.
  bool find(uint64_t id, uint32_t* rkey) const;

 private:
  Status add_range(const Memory& memory, int access, Owned<ibv_mr>* out) const;
  Status open_local(Registration& registration) const;
  Status open_remote(const Memory& memory, const KeyScope& scope, Owned<ibv_mr>* out) const;
  // With mutex_ held.
  Status expose(Registration& registration, const KeyScope& scope, std::string* key);
  Status cover(Registration& registration);
  std::string key_of(const Registration& registration, const Exposed& exposed) const;

  const std::shared_ptr<const Device> device_;
  const uint64_t incarnation_;
  mutable std::mutex mutex_;
  std::set<Registration*> all_;
  std::map<uint64_t, const Exposed*> by_id_;
  uint32_t life_ = 1;  // of the device; 0: it has failed
};

// The number of a peer's key, in the life of the peer's device that gave it.
struct KeyNumber {
  explicit KeyNumber(const MemoryKey& key) : id(key.id), newest(pack(key.life, key.rkey)) {}
  static constexpr uint64_t pack(uint32_t life, uint32_t rkey) { return uint64_t{life} << 32 | rkey; }

  const uint64_t id;
  std::atomic<uint64_t> newest;    // partner: the service thread stores what it was answered, the lock's holder loads
  std::atomic<bool> asked{false};  // partner: the lock's holder sets, the service thread clears
  std::atomic<bool> gone{
      false};  // partner: the service thread sets, the lock's holder loads: its owner knows no such key
};

class RemoteRegion final : public RemoteMemory {
 public:
  explicit RemoteRegion(const MemoryKey& k) : key(k), number(std::make_shared<KeyNumber>(k)) {}
  const MemoryKey key;
  const std::shared_ptr<KeyNumber> number;
};

}  // namespace asyncfabric::verbs
