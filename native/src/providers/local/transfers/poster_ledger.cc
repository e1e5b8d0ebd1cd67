// poster_ledger.cc: the bookkeeping of Poster: hazards, immediates, waking the target, completions and what waits for
// room.
#include <cstring>

#include "providers/local/transfers/barrier.h"
#include "providers/local/transfers/poster.h"

namespace asyncfabric::local {
namespace {

// The target's word about a bounced request: only what it may truthfully report is passed on.
Status verdict(uint32_t word) {
  switch (const auto code = static_cast<StatusCode>(word); code) {
    case StatusCode::kOk:
    case StatusCode::kStaleKey:
    case StatusCode::kOutOfBounds:
    case StatusCode::kAccessDenied: return code;
    default: return StatusCode::kTransport;
  }
}

}  // namespace

bool Poster::hold(Outgoing& link, const RemoteHandle& remote) {
  if (held_link_ != &link || held_slot_ != remote.slot) {
    let_go();
    held_link_ = &link;
    held_slot_ = remote.slot;
    link.ring.header().active_slot.store(remote.slot + 1, std::memory_order_seq_cst);
  }
  // Looked at for each request: a revoke waits for the one in progress, not for the rest of the post.
  return link.board().slots[remote.slot].mark.load(std::memory_order_seq_cst) == remote.mark;
}

void Poster::let_go() {
  if (held_link_ == nullptr) return;
  held_link_->ring.header().active_slot.store(0, std::memory_order_release);
  held_link_ = nullptr;
}

// An open batch has its entry reserved: nobody else publishes on the link before close_batch(). The batch may be closed before the new
// immediates are added (news that should not wait for a long copy), so they have room only in entries behind it.
bool Poster::room_for_imms(Outgoing& link, uint32_t imms) const {
  const uint64_t open = link.batch.count != 0 ? 1 : 0;
  return link.ring.has_room(open + (imms + kImmsPerEntry - 1) / kImmsPerEntry);
}

void Poster::add_imm(Outgoing& link, const WorkRequest& request) {
  link.batch.imms[link.batch.count++] = request.imm;
  touch(link);
  if (link.batch.count == kImmsPerEntry) close_batch(link);
  if (request.length >= kLargeBytes) announce(link);
}

void Poster::close_batch(Outgoing& link) {
  if (link.batch.count == 0) return;
  link.batch.kind = EntryKind::kImmediates;
  link.ring.publish(link.batch);
  link.batch.count = 0;
}

void Poster::touch(Outgoing& link) {
  if (link.touched) return;
  link.touched = true;
  touched_.push_back(&link);
}

void Poster::announce(Outgoing& link) {
  if (!link.touched) return;
  link.touched = false;
  close_batch(link);
  store_load_barrier();
  link.target->wake();
}

void Poster::block(Outgoing& link) {
  link.blocked_at = link.ring.seen_consumed();
  if (link.blocked) return;
  link.blocked = true;
  blocked_.push_back(link.shared_from_this());
}

void Poster::finish(Outgoing& link, const WorkRequest& request, Status status) {
  if (!request.signalled && status.ok()) return;
  if (!link.has_deferred()) return done_.push(request.tag, status);
  Deferred behind;
  behind.tag = request.tag;
  behind.status = status;
  defer(link, behind);
}

void Poster::defer(Outgoing& link, const Deferred& deferred) {
  link.deferred.push_back(deferred);
  if (link.waits) return;
  link.waits = true;
  waiting_.push_back(link.shared_from_this());
}

void Poster::settle() {
  for (size_t i = 0; i < waiting_.size();) {
    Outgoing& link = *waiting_[i];
    if (link.lost.load(std::memory_order_acquire)) fail_all(link, StatusCode::kPeerDead);
    for (; link.has_deferred(); ++link.deferred_head) {
      const Deferred& front = link.deferred[link.deferred_head];
      Status status = front.status;
      if (front.awaits) {
        if (link.ring.consumed() <= front.position) break;
        status = verdict(link.ring.result(front.position));
        if (status.ok() && front.read_target != nullptr)
          std::memcpy(front.read_target, link.ring.staging(front.staging), front.length);
      }
      if (front.signalled || !status.ok()) done_.push(front.tag, status);
    }
    if (link.has_deferred()) {
      ++i;
      continue;
    }
    link.deferred.clear();
    link.deferred_head = 0;
    link.waits = false;
    waiting_[i] = std::move(waiting_.back());
    waiting_.pop_back();
  }
}

void Poster::fail_all(Outgoing& link, Status status) {
  for (; link.has_deferred(); ++link.deferred_head) {
    const Deferred& front = link.deferred[link.deferred_head];
    if (front.awaits || front.signalled) done_.push(front.tag, front.awaits ? status : front.status);
  }
}

bool Poster::may_sleep() {
  settle();
  if (!done_.empty()) return false;
  for (size_t i = 0; i < blocked_.size();) {
    Outgoing& link = *blocked_[i];
    link.ring.ask_for_room(1);  // once more: the consumer may have cleared the flag while we were awake
    const bool moved = !link.alive() || link.ring.consumed() != link.blocked_at;
    if (!moved) {
      ++i;
      continue;
    }
    link.blocked = false;
    blocked_[i] = std::move(blocked_.back());
    blocked_.pop_back();
    return false;
  }
  return true;
}

}  // namespace asyncfabric::local
