// messages.cc: see messages.h. Receives are reposted one poll after their message was handed out.
#include "providers/libfabric/transfers/messages.h"

#include <sys/mman.h>

#include <cerrno>

#include "providers/libfabric/device/errors.h"

namespace asyncfabric::libfabric {
namespace {

constexpr size_t kScratchBytes = 4096;
constexpr size_t kSendSlots = 1024;
constexpr size_t kReservedSends = 64;
constexpr size_t kReceiveSlots = 128;
constexpr size_t kMappedBytes = kScratchBytes + (kSendSlots + kReceiveSlots) * kSlotBytes;

}  // namespace

Status MessageBuffers::open(const Device& device, std::unique_ptr<MessageBuffers>* out) {
  std::unique_ptr<MessageBuffers> buffers(new MessageBuffers(device));
  void* mapped = mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return {StatusCode::kNoMemory, errno};
  buffers->base_ = static_cast<uint8_t*>(mapped);
  // Peers may write into the scratch word: signals carry no bytes, but a hostile peer could. Nothing is ever read from it.
  const Memory scratch{buffers->base_, 64, kHostDevice, -1, kAccessRemoteWrite};
  if (const Status status = register_range(device, scratch, &buffers->scratch_mr_); !status.ok()) return status;
  uint8_t* slots = buffers->base_ + kScratchBytes;
  if (device.needs(FI_MR_LOCAL)) {
    const Memory messages{slots, kMappedBytes - kScratchBytes, kHostDevice, -1, kAccessLocal};
    if (const Status status = register_range(device, messages, &buffers->mr_); !status.ok()) return status;
  }
  for (size_t i = 0; i < kSendSlots; ++i) buffers->free_sends_.push_back(slots + i * kSlotBytes);
  buffers->receives_.resize(kReceiveSlots);
  buffers->unposted_.reserve(kReceiveSlots);
  for (size_t i = 0; i < kReceiveSlots; ++i) buffers->receives_[i].bytes = slots + (kSendSlots + i) * kSlotBytes;
  *out = std::move(buffers);
  return StatusCode::kOk;
}

MessageBuffers::~MessageBuffers() {
  mr_.reset();
  scratch_mr_.reset();
  if (base_ != nullptr) munmap(base_, kMappedBytes);
}

Status MessageBuffers::post_all_receives() {
  for (ReceiveSlot& slot : receives_) repost(&slot);
  return unposted_.size() == receives_.size() ? Status(StatusCode::kTransport) : Status();
}

void MessageBuffers::repost(ReceiveSlot* slot) {
  const ssize_t error = fi_recv(device_.endpoint(), slot->bytes, kSlotBytes, descriptor(), FI_ADDR_UNSPEC, &slot->fi);
  if (error != 0) unposted_.push_back(slot);
}

void MessageBuffers::retry_reposts() {
  if (unposted_.empty()) return;
  std::vector<ReceiveSlot*> again;
  again.reserve(receives_.size());
  again.swap(unposted_);
  for (ReceiveSlot* slot : again) repost(slot);
}

uint8_t* MessageBuffers::take_send_slot(bool internal) {
  if (free_sends_.size() <= (internal ? 0 : kReservedSends)) return nullptr;
  uint8_t* slot = free_sends_.back();
  free_sends_.pop_back();
  return slot;
}

}  // namespace asyncfabric::libfabric
