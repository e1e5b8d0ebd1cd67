// reopening.cc: a device that failed is closed and opened again. Service thread.
//   event -> kDeviceFailed to the lock's holder, which ends its requests and gives its queues back (kWreck) -> nothing of ours is in the device: it is
//   closed -> tried again after 1, 2, 4 ... 30 s, then each 30 s until the rail closes -> open: memory is registered anew, the lock's holder gets
//   queues, our connections are built again, and peers learn where theirs lead to
// Closing the device's file is the fence: the kernel takes all that is left in it away from the device, also what a dead driver did not destroy.
#include <algorithm>

#include "base/clock.h"
#include "providers/verbs/peers/exchange.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint64_t kLongestOpenGapNs = 30'000'000'000;
constexpr uint64_t kFirstMoveNs = 20'000'000;
constexpr uint64_t kLongestMoveNs = 500'000'000;
constexpr uint32_t kMostMoves = 64;  // half a minute: who does not answer by then is not there

}  // namespace

// In the order that the library demands: queue pairs, what they use, memory, the device.
void Exchange::bury(Job& job) {
  for (auto& [id, out] : outgoing_)
    for (QueuePair& pair : out.pairs) pair = {};
  for (auto& [id, in] : incoming_) moved_[id] = {.peer = in.sender};
  incoming_.clear();
  retiring_.clear();
  const std::vector<std::shared_ptr<ReceiveBlock>> blocks = job.queues->receives->blocks();
  queues_ = nullptr;
  job.queues.reset();
  for (const auto& block : blocks) block->mr.reset();
  sends_->mr.reset();
  box_.reset();
  registry_->close_all();
  device_.close();
  look_again_ns_ = ~0ull;
  open_gap_ns_ = uint64_t{device_.options().reopen_ms} * 1'000'000;
  open_at_ns_ = now_ns() + open_gap_ns_;
}

Status Exchange::open_again(std::shared_ptr<Queues>* queues, std::string* why) {
  if (const Status status = device_.reopen(why); !status.ok()) return status;
  if (const Status status = Queues::open(device_, queues, why); !status.ok()) return status;
  if (const Status status = Postbox::open(device_, &box_, why); !status.ok()) return status;
  if (const Status status = sends_->enter(device_); !status.ok()) return status;
  if (device_.ethernet() != (address_.ethernet != 0)) return StatusCode::kNoProvider;
  if (!watch({box_->fd(), device_.context()->async_fd})) return StatusCode::kNoMemory;
  return registry_->open_all(address_.life + 1);
}

void Exchange::try_to_open(uint64_t now) {
  std::shared_ptr<Queues> queues;
  std::string why;
  if (!open_again(&queues, &why).ok()) {
    registry_->close_all();
    sends_->mr.reset();
    box_.reset();
    queues.reset();
    device_.close();
    open_gap_ns_ = std::min(open_gap_ns_ * 2, kLongestOpenGapNs);
    open_at_ns_ = now + open_gap_ns_;
    return;
  }
  open_at_ns_ = ~0ull;
  ++address_.life;
  move_in();
  queues_ = queues.get();
  windows_ = free_windows_ = 0;
  failed_ = link_down_ = address_gone_ = false;
  device_.set_trouble(Trouble::kNone);
  News news;
  news.kind = NewsKind::kDeviceOpen;
  news.queues = std::move(queues);
  news.address = address_;
  handover_->post(std::move(news));
  for (auto& [id, out] : outgoing_)
    if (!out.closing) begin(out, kAllLanes);
}

void Exchange::send_moved(uint64_t now, uint64_t* next) {
  if (failed_) return;
  for (auto at = moved_.begin(); at != moved_.end();) {
    Moved& moved = at->second;
    if (now >= moved.next_try_ns) {
      if (moved.tries++ == kMostMoves) {
        at = moved_.erase(at);
        continue;
      }
      moved.gap_ns = moved.gap_ns == 0 ? kFirstMoveNs : std::min(moved.gap_ns * 2, kLongestMoveNs);
      moved.next_try_ns = now + moved.gap_ns;
      Datagram datagram;
      datagram.kind = DatagramKind::kMoved;
      datagram.connection = at->first;
      post(moved.peer, datagram);
    }
    *next = std::min(*next, moved.next_try_ns);
    ++at;
  }
}

}  // namespace asyncfabric::verbs
