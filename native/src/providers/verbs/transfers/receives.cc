// receives.cc: see receives.h.
#include "providers/verbs/transfers/receives.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "providers/verbs/device/errors.h"

namespace asyncfabric::verbs {

Status ReceiveBlock::make(const Device& device, uint32_t slots, std::shared_ptr<ReceiveBlock>* out) {
  auto block = std::make_shared<ReceiveBlock>();
  const size_t length = size_t{slots} * kSlotBytes;
  void* mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return {StatusCode::kNoMemory, errno};
  block->bytes = static_cast<uint8_t*>(mapped);
  block->slots = slots;
  const Status status = block->enter(device);
  if (status.ok()) *out = std::move(block);
  return status;
}

Status ReceiveBlock::enter(const Device& device) {
  mr = own(device.library().ibv_reg_mr_iova2(device.pd(), bytes, size_t{slots} * kSlotBytes,
                                             reinterpret_cast<uint64_t>(bytes), IBV_ACCESS_LOCAL_WRITE),
           device.library().ibv_dereg_mr);
  return mr ? Status() : status_of_call(errno);
}

ReceiveBlock::~ReceiveBlock() {
  mr.reset();
  if (bytes != nullptr) munmap(bytes, size_t{slots} * kSlotBytes);
}

Status Receives::open(const Device& device, uint32_t most_messages, std::unique_ptr<Receives>* out,
                      std::string* detail) {
  std::unique_ptr<Receives> receives(new Receives(device));
  const Library& library = device.library();
  const auto most = static_cast<uint32_t>(device.limits().max_srq_wr);
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = std::min(device.options().receives, most);
  attributes.attr.max_sge = 1;
  receives->counts_ = own(library.ibv_create_srq(device.pd(), &attributes), library.ibv_destroy_srq);
  receives->count_depth_ = std::min(device.options().receives, attributes.attr.max_wr);
  attributes.attr.max_wr = std::min(most_messages, most);
  attributes.attr.max_sge = 1;
  if (receives->counts_)
    receives->messages_ = own(library.ibv_create_srq(device.pd(), &attributes), library.ibv_destroy_srq);
  receives->message_depth_ = std::min(most_messages, attributes.attr.max_wr);
  if (!receives->messages_) {
    *detail = "verbs: " + device.name() + ": no shared receive queue (" + std::strerror(errno) + ")";
    return {StatusCode::kNoProvider, errno};
  }
  receives->batch_ = std::clamp(receives->count_depth_ / 4, 1u, kMaxBatch);
  receives->counts_due_ = receives->count_depth_;
  receives->refill(true);
  receives->rearm_limit();
  *out = std::move(receives);
  return {};
}

// All plain receives are alike, so a chain of them is one constant.
void Receives::refill(bool all) {
  static const std::array<ibv_recv_wr, kMaxBatch> chain = [] {
    std::array<ibv_recv_wr, kMaxBatch> made{};
    for (ibv_recv_wr& each : made) each.wr_id = kind_bits(Kind::kCount);
    return made;
  }();
  while (counts_due_ >= batch_ || (all && counts_due_ != 0)) {
    std::array<ibv_recv_wr, kMaxBatch> requests = chain;
    const uint32_t count = std::min(counts_due_, batch_);
    for (uint32_t i = 0; i + 1 < count; ++i) requests[i].next = &requests[i + 1];
    ibv_recv_wr* bad = nullptr;
    ++posts_;
    const int error = ibv_post_srq_recv(counts_.get(), requests.data(), &bad);
    const auto left = error == 0 ? 0u : count - static_cast<uint32_t>(bad != nullptr ? bad - requests.data() : 0);
    counts_due_ -= count - left;
    if (error != 0) return;  // tried again with the next pass
  }
}

void Receives::rearm_limit() {
  ibv_srq_attr attributes{};
  attributes.srq_limit = std::max(1u, batch_ / 2);
  (void)device_.library().ibv_modify_srq(counts_.get(), &attributes, IBV_SRQ_LIMIT);  // a hint: not every device has it
}

void Receives::add(std::shared_ptr<ReceiveBlock> block) {
  blocks_.push_back(std::move(block));
  for (uint32_t i = 0; i < blocks_.back()->slots && where_.size() < message_depth_; ++i) {
    where_.emplace_back(static_cast<uint32_t>(blocks_.size() - 1), i);
    repost(static_cast<uint32_t>(where_.size() - 1));
  }
}

const uint8_t* Receives::slot_bytes(uint32_t slot) const {
  const auto [block, place] = where_[slot];
  return blocks_[block]->bytes + size_t{place} * kSlotBytes;
}

bool Receives::post_slot(uint32_t slot) {
  const auto [block, place] = where_[slot];
  ReceiveBlock& memory = *blocks_[block];
  ibv_sge piece{reinterpret_cast<uint64_t>(memory.bytes + size_t{place} * kSlotBytes), kSlotBytes, memory.mr->lkey};
  ibv_recv_wr request{};
  request.wr_id = kind_bits(Kind::kMessage) | slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  ++posts_;
  return ibv_post_srq_recv(messages_.get(), &request, &bad) == 0;
}

void Receives::repost(uint32_t slot) {
  if (!post_slot(slot)) unposted_.push_back(slot);
  while (!unposted_.empty() && unposted_.back() != slot && post_slot(unposted_.back())) unposted_.pop_back();
}

}  // namespace asyncfabric::verbs
