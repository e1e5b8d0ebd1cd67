// memory.h: registered memory and remote keys. Control thread; the data path only reads the finished values.
// Memory that peers may touch is registered twice: once for our own requests, once for its remote key. Revoking replaces the second
// one alone, so our own transfers out of that memory go on.
#pragma once

#include <memory>
#include <string>

#include "provider/provider.h"
#include "providers/verbs/device.h"

namespace asyncfabric::verbs {

class Registration final : public LocalMemory {
 public:
  static Status create(std::shared_ptr<const Device> device, uint64_t incarnation, const Memory& memory,
                       std::unique_ptr<Registration>* out, std::string* key);

  Status renew(std::string* key);  // a new key for the same memory; the old one is dead on return
  Status close();                  // nothing touches the memory any more on return
  uint32_t lkey() const { return local_->lkey; }
  bool on_host() const { return memory_.device == kHostDevice; }
  bool contains(const void* address, uint64_t length) const {
    const auto offset = reinterpret_cast<uint64_t>(address) - reinterpret_cast<uint64_t>(memory_.base);
    return offset <= memory_.length && length <= memory_.length - offset;
  }

 private:
  Registration(std::shared_ptr<const Device> device, uint64_t incarnation, const Memory& memory)
      : device_(std::move(device)), incarnation_(incarnation), memory_(memory) {}
  Status add(int access, Owned<ibv_mr>* out) const;
  Status open_remote(Owned<ibv_mr>* out, std::string* key) const;

  std::shared_ptr<const Device> device_;  // outlives the registrations
  const uint64_t incarnation_;
  const Memory memory_;
  Owned<ibv_mr> local_;
  Owned<ibv_mr> remote_;
};

class RemoteRegion final : public RemoteMemory {
 public:
  explicit RemoteRegion(const MemoryKey& k) : key(k) {}
  const MemoryKey key;
};

}  // namespace asyncfabric::verbs
