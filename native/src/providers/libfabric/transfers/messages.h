// messages.h: the buffers of two-sided messages: send slots, posted receive slots, and the word that signals name.
// One mapping, registered where the provider wants it. Under the engine lock only after opening.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "providers/libfabric/device/device.h"
#include "providers/libfabric/memory/memory.h"
#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::libfabric {

constexpr size_t kPayloadBytes = 10240;  // contract: at least kMaxMessageBytes + 1024
constexpr size_t kSlotBytes = 10496;     // head and payload, rounded to 256

struct ReceiveSlot {
  fi_context2 fi{};  // first: comes back as op_context
  uint8_t* bytes = nullptr;
};

class MessageBuffers {
 public:
  static Status open(const Device& device, std::unique_ptr<MessageBuffers>* out);
  ~MessageBuffers();

  Status post_all_receives();
  void repost(ReceiveSlot* slot);  // keeps the slot for a later try when the provider is busy
  void retry_reposts();
  bool owns(const void* context) const {
    return context >= receives_.data() && context < receives_.data() + receives_.size();
  }

  uint8_t* take_send_slot(bool internal);  // some are kept for the rail's own messages
  void give_send_slot(uint8_t* slot) { free_sends_.push_back(slot); }
  void* descriptor() const { return mr_ ? fi_mr_desc(mr_.get()) : nullptr; }

  uint8_t* scratch() const { return base_; }
  void* scratch_descriptor() const { return fi_mr_desc(scratch_mr_.get()); }
  uint64_t scratch_key() const { return fi_mr_key(scratch_mr_.get()); }
  uint64_t scratch_address() const { return device_.needs(FI_MR_VIRT_ADDR) ? reinterpret_cast<uint64_t>(base_) : 0; }

 private:
  explicit MessageBuffers(const Device& device) : device_(device) {}

  const Device& device_;
  uint8_t* base_ = nullptr;
  MrPtr scratch_mr_;
  MrPtr mr_;
  std::vector<uint8_t*> free_sends_;
  std::vector<ReceiveSlot> receives_;
  std::vector<ReceiveSlot*> unposted_;
};

}  // namespace asyncfabric::libfabric
