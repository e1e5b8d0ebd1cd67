// receives.h: what a rail holds ready for its peers: plain receives, without memory, that immediates use up, and receives with a slot
// each for messages. Two shared receive queues for all peers: counts need many receives and no memory, messages few and large.
// Posted under the engine lock; blocks of slots are made on the service thread.
#pragma once

#include <memory>
#include <vector>

#include "providers/verbs/device/device.h"

namespace asyncfabric::verbs {

constexpr uint32_t kPayloadBytes = 10240;  // contract: at least kMaxMessageBytes + 1024
constexpr uint32_t kSlotBytes = 10240;

// Kinds of work-request ids, in their upper four bits. A failed completion reports nothing but its id and status.
enum class Kind : uint64_t { kSend = 1, kCount = 2, kMessage = 3, kCredit = 4, kCreditSent = 5 };
constexpr uint64_t kind_bits(Kind kind) { return static_cast<uint64_t>(kind) << 60; }
constexpr Kind kind_of(uint64_t id) { return static_cast<Kind>(id >> 60); }

// Slots for received messages (or, likewise, for copies of sent ones): one mapping, one registration.
struct ReceiveBlock {
  static Status make(const Device& device, uint32_t slots, std::shared_ptr<ReceiveBlock>* out);
  Status enter(const Device& device);  // registers the mapping
  ~ReceiveBlock();

  uint8_t* bytes = nullptr;
  uint32_t slots = 0;
  Owned<ibv_mr> mr;
};

class Receives {
 public:
  static Status open(const Device& device, uint32_t most_messages, std::unique_ptr<Receives>* out, std::string* detail);

  ibv_srq* counts() const { return counts_.get(); }
  ibv_srq* messages() const { return messages_.get(); }
  uint32_t count_depth() const { return count_depth_; }
  uint32_t message_depth() const { return message_depth_; }

  // Under the engine lock.
  void count_used() { ++counts_due_; }
  void refill(bool all);  // in batches: at the low-water mark, or whatever is missing
  void rearm_limit();     // ask for the next report when receives run out
  void add(std::shared_ptr<ReceiveBlock> block);
  const uint8_t* slot_bytes(uint32_t slot) const;
  const std::vector<std::shared_ptr<ReceiveBlock>>& blocks() const { return blocks_; }
  void repost(uint32_t slot);
  uint64_t posts() const { return posts_; }

 private:
  static constexpr uint32_t kMaxBatch = 64;

  explicit Receives(const Device& device) : device_(device) {}
  bool post_slot(uint32_t slot);

  const Device& device_;
  Owned<ibv_srq> counts_;
  Owned<ibv_srq> messages_;
  uint32_t count_depth_ = 0;
  uint32_t message_depth_ = 0;
  uint32_t batch_ = 1;
  uint32_t counts_due_ = 0;
  uint64_t posts_ = 0;  // calls into the library
  std::vector<std::shared_ptr<ReceiveBlock>> blocks_;
  std::vector<std::pair<uint32_t, uint32_t>> where_;  // slot -> block, place in it
  std::vector<uint32_t> unposted_;
};

}  // namespace asyncfabric::verbs
