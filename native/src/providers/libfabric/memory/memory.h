// memory.h: registered memory and remote keys. A key of fewer rights, or of a strict range, is a registration of its own: the library, or
// the NIC, looks at nothing else when a request lands. Control thread; the data path only reads the finished values.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "provider/provider.h"
#include "providers/libfabric/device/device.h"
#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::libfabric {

class Registration final : public LocalMemory {
 public:
  // `key` = bytes for peers. Memory without remote rights is only registered where the provider wants local registration.
  static Status create(std::shared_ptr<Device> device, const Memory& memory, std::unique_ptr<Registration>* out,
                       std::string* key);

  ~Registration() override { close(); }
  Status renew(std::string* key);  // a new key for the same memory; close() came before
  Status narrow(const KeyScope& scope, std::string* key);
  void close() {  // from now on the target refuses all keys
    narrower_.clear();
    mr_.reset();
  }
  bool remotely_accessible() const { return memory_.access != kAccessLocal; }
  void* descriptor() const { return descriptor_; }
  uint64_t fence = 0;  // the number that its end waits for; 0: nobody was asked yet
  bool contains(const void* address, uint64_t length) const {
    const auto offset = reinterpret_cast<uint64_t>(address) - reinterpret_cast<uint64_t>(memory_.base);
    return offset <= memory_.length && length <= memory_.length - offset;
  }

 private:
  Registration(std::shared_ptr<Device> device, const Memory& memory) : device_(std::move(device)), memory_(memory) {}
  Status open(std::string* key);
  MemoryKey key_of(const KeyScope& scope, const MrPtr& mr) const;

  std::shared_ptr<Device> device_;  // outlives mr_
  Memory memory_;
  MrPtr mr_;
  std::map<KeyScope, MrPtr> narrower_;
  void* descriptor_ = nullptr;
};

class RemoteRegion final : public RemoteMemory {
 public:
  // Offsets of requests count from the start of the memory, not of the part that the key reaches.
  explicit RemoteRegion(const MemoryKey& k)
      : key{k.provider, k.access, k.key, k.base - k.first, k.first + k.length, 0} {}
  const MemoryKey key;
};

// For any slab of the rail itself; `mr` stays empty where nothing needs registering.
Status register_range(const Device& device, const Memory& memory, MrPtr* mr);

}  // namespace asyncfabric::libfabric
