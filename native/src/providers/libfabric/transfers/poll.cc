// poll.cc: what came back from libfabric: completions, immediates, messages, errors; and when the worker may sleep.
// On an ordered rail completions of one peer are reported in the order of posting, so that a reported one implies that all
// earlier ones are complete, whatever order the provider's CQ has.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "providers/libfabric/device/errors.h"
#include "providers/libfabric/rail.h"

namespace asyncfabric::libfabric {
namespace {

constexpr size_t kReadAtOnce = 64;
bool introduces(const Context& context) {
  MessageHead head;
  return !context.reported && context.payload != nullptr && parse(context.payload, kMessageHeadBytes, &head) &&
         head.kind == MessageKind::kIntroduce;
}

// Bytes of a peer's write are moved by our reads of the CQ, which report nothing until the last ones. A read that took kMovedNs moved some, and
// more may have come meanwhile: a poll goes on for kMovingNs.
constexpr uint64_t kMovedNs = 5'000, kMovingNs = 100'000;
constexpr uint64_t kProbeAgainNs = 20'000'000;
constexpr uint64_t kDoubtProbeNs = 2'000'000;
constexpr uint64_t kDoubtNs = 10'000'000'000;  // the engine's heartbeats find the dead sooner
constexpr size_t kMostStashed = 4096;          // hostile peers must not make the stash grow without bound

}  // namespace

// A message that has to wait for the next poll is copied and its receive posted again at once: a fence runs without polls and waits for
// answers that are behind such messages, of which there may be more than receives.
void LibfabricRail::emit(const RailEvent& event, ReceiveSlot* slot) {
  if (filled_ == room_.size()) {
    Stashed& kept = stash_.emplace_back(Stashed{event, slot, nullptr});
    if (slot == nullptr || stash_.size() > kMostStashed) return;
    kept.copy = std::make_unique_for_overwrite<uint8_t[]>(event.length);
    if (event.length != 0) std::memcpy(kept.copy.get(), event.data, event.length);
    kept.event.data = kept.copy.get();
    kept.slot = nullptr;
    buffers_->repost(slot);
    return;
  }
  room_[filled_++] = event;
  if (slot != nullptr) handed_out_.push_back(slot);
}

// Gives the context back and reports to the engine, unless nobody wants to know.
void LibfabricRail::retire(Context& context) {
  PeerState& peer = *context.peer;
  peer.requests.remove(&context);
  --peer.outstanding;
  any_spare_ |= peer.handle == nullptr && peer.requests.empty();
  if (context.reported && !(context.quiet && context.status.ok())) {
    RailEvent event;
    event.kind = RailEventKind::kDone;
    event.status = context.status;
    event.tag = context.tag;
    emit(event, nullptr);
  }
  unmet_sends_ -= context.unmet ? 1 : 0;
  if (context.payload != nullptr) buffers_->give_send_slot(context.payload);
  contexts_->give(&context);
}

bool LibfabricRail::reportable(const Context& context) const {
  if (!context.done) return false;
  if (context.peer->doubted_until_ns != 0 && context.status.code == StatusCode::kTransport) return false;
  return !device_->profile().acknowledged || !context.status.ok() || context.sequence <= context.peer->acknowledged;
}

void LibfabricRail::finish(Context& context, Status status) {
  PeerState& peer = *context.peer;
  const bool held = context.submitted && !context.done;  // one that waits for the target's word may fail after it left
  context.done = true;
  context.status = status;
  if (status.kind == StatusKind::kPeer) end_doubt(peer, StatusCode::kPeerDead);
  if (status.ok() && !peer.closed && introduces(context)) (void)send_answer(peer, 0);
  if (held) {
    --peer.submitted;
    peer.open_bytes -= context.bytes;
    if (context.acknowledges) {
      --peer.asks_in_flight;
      if (status.ok()) peer.acknowledged = std::max(peer.acknowledged, context.sequence);
      if (status.ok() && context.sequence > peer.broke_at) end_doubt(peer, StatusCode::kTransport);
      if (peer.asks_in_flight == 0 && peer.asked < peer.last_sequence) cover_later();
    }
  }
  if (!capabilities_.ordered) {
    retire(context);
    return;
  }
  while (peer.requests.head != nullptr && reportable(*peer.requests.head)) retire(*peer.requests.head);
}

// The stream to a peer broke. libfabric opens a new one by itself, so a later request could arrive although an earlier one of
// the same transfer was lost, and an immediate would be counted without its data (INV-1). Everything that was posted before the
// engine can know of the break fails, unless its arrival is proven.
void LibfabricRail::break_stream(PeerState& peer, Status status) {
  for (Context* context = peer.requests.head; context != nullptr; context = context->next) {
    const bool unproven = context->done && context->status.ok() && context->sequence > peer.acknowledged;
    const bool unsent = !context->submitted && !context->done;
    if (unproven || unsent) context->status = status;
    if (unsent) context->done = true;
  }
  peer.backlog = nullptr;
  peer.asked = peer.broke_at = peer.last_sequence;  // nothing is left that an answer could prove
  while (peer.requests.head != nullptr && reportable(*peer.requests.head)) retire(*peer.requests.head);
  if (!peer.closed && !peer.lost) (void)introduce(peer);  // the first introduction may be among what was lost
}

// The peer lives (kTransport: its stream alone broke) or is dead (kPeerDead): what was kept for this is reported.
void LibfabricRail::end_doubt(PeerState& peer, Status verdict) {
  if (peer.doubted_until_ns == 0) return;
  peer.doubted_until_ns = 0;
  --doubts_;
  for (Context* context = peer.requests.head; context != nullptr; context = context->next)
    if (context->done && context->status.code == StatusCode::kTransport)
      context->status = Status(verdict.code, context->status.raw);
  while (peer.requests.head != nullptr && reportable(*peer.requests.head)) retire(*peer.requests.head);
}

void LibfabricRail::look_into_doubts() {
  if (doubts_ == 0) return;
  const uint64_t now = now_ns();
  for (size_t i = 0; i < peers_.size(); ++i) {
    PeerState& peer = *peers_[i];
    if (peer.doubted_until_ns == 0) continue;
    if (now >= peer.next_probe_ns) {
      peer.next_probe_ns = now + kDoubtProbeNs;
      if (nobody_listens(peer.remote)) lose(peer);
    }
    if (now >= peer.doubted_until_ns) end_doubt(peer, StatusCode::kTransport);
  }
}

// At the end of a pass, so before the engine can post anything that would travel on a new connection.
void LibfabricRail::rebuild_broken() {
  if (!any_broken_) return;
  any_broken_ = false;
  for (size_t i = 0; i < peers_.size(); ++i)  // rebuild() reads the CQ: a message there may open a connection
    if (peers_[i]->broken && !peers_[i]->closed) rebuild(*peers_[i]);
}

// The queue pair is in error and everything that was on it or waits for it fails; the engine may post again after this poll.
void LibfabricRail::rebuild(PeerState& peer) {
  const Status status{StatusCode::kTransport, FI_ECONNABORTED};
  break_stream(peer, status);
  progress_into_stash();
  peer.own_endpoint.reset();
  progress_into_stash();   // nothing in the CQ may name a context that is given back below
  peer.backlog = nullptr;  // the introduction may wait there
  while (!peer.requests.empty()) finish(*peer.requests.head, status);
  peer.broken = false;
  if (open_own_endpoint(peer).ok()) return;
  peer.endpoint = nullptr;
  lose(peer);
}

size_t LibfabricRail::poll(std::span<RailEvent> events) {
  room_ = events;
  filled_ = 0;
  for (ReceiveSlot* slot : handed_out_) buffers_->repost(slot);
  handed_out_.clear();
  copies_handed_out_.clear();
  buffers_->retry_reposts();
  while (!stash_.empty() && filled_ < room_.size()) {
    Stashed stashed = std::move(stash_.front());
    stash_.pop_front();
    emit(stashed.event, stashed.slot);
    if (stashed.copy) copies_handed_out_.push_back(std::move(stashed.copy));
  }
  cover();
  advance_backlogs();
  const uint64_t begin = now_ns();
  for (uint64_t before = begin; filled_ < room_.size();) {
    const size_t limit = std::min(kReadAtOnce, room_.size() - filled_);
    const size_t count = read_cq(limit);
    if (count == limit) continue;
    const uint64_t now = now_ns(), took_ns = now - std::exchange(before, now);
    if (!device_->profile().over_sockets || count != 0 || took_ns < kMovedNs || now - begin > kMovingNs) break;
  }
  look_into_doubts();
  rebuild_broken();
  close_spare_paths();
  if (device_->profile().over_sockets && half_open_.is_due()) (void)end_half_open(false);
  const size_t count = filled_;
  room_ = {};  // whatever fails outside of a poll goes to the stash
  filled_ = 0;
  return count;
}

// Also drives the progress of providers that have no thread of their own.
size_t LibfabricRail::read_cq(size_t limit) {
  std::array<fi_cq_data_entry, kReadAtOnce> entries;
  const ssize_t count = fi_cq_read(device_->cq(), entries.data(), std::min(limit, entries.size()));
  if (count == -FI_EAVAIL) {
    take_error();
    return limit;  // there may be more
  }
  if (count <= 0) return 0;
  for (ssize_t i = 0; i < count; ++i) take_entry(entries[static_cast<size_t>(i)]);
  return static_cast<size_t>(count);
}

void LibfabricRail::take_entry(const fi_cq_data_entry& entry) {
  if (contexts_->owns(entry.op_context)) {
    finish(*static_cast<Context*>(entry.op_context), StatusCode::kOk);
    return;
  }
  ReceiveSlot* slot = buffers_->owns(entry.op_context) ? static_cast<ReceiveSlot*>(entry.op_context) : nullptr;
  if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
    // Over sockets immediates come with writes alone. A stranger's message may claim one that its header has no room for: libfabric takes what
    // an earlier header left there, which may be a peer's.
    if (slot == nullptr || !names_connections_) take_immediate(entry.data);
    if (slot != nullptr) buffers_->repost(slot);  // FI_RX_CQ_DATA: the immediate used up a receive
  } else if (slot != nullptr) {
    take_message(slot, entry.len);
  }
}

void LibfabricRail::take_immediate(uint64_t data) {
  const auto tag = static_cast<uint32_t>(data >> 32);
  if (names_connections_ && (shut_out_.holds(tag) || !admitted_.takes(tag))) return;
  RailEvent event;
  event.kind = RailEventKind::kImmediate;
  event.imm = static_cast<uint32_t>(data);
  emit(event, nullptr);
}

void LibfabricRail::take_error() {
  CompletionError failed;
  const fi_cq_err_entry& error = failed.known;
  if (fi_cq_readerr(device_->cq(), &failed.known, 0) < 1) return;
  if (contexts_->owns(error.op_context)) {
    auto* context = static_cast<Context*>(error.op_context);
    // A context that is free or done already: the provider reported one request twice. Nothing to report.
    if (context->peer == nullptr || !context->submitted || context->done) return;
    PeerState& peer = *context->peer;
    const int number = error.err != 0 ? error.err : FI_EIO;
    const auto name = device_->profile().name_failure;
    const Status status = name != nullptr ? name(number, error.prov_errno) : diagnose(peer, number);
    finish(*context, status);
    if (device_->profile().rebuilds_after_failure)
      peer.broken = any_broken_ = true;
    else if (device_->profile().acknowledged && connection_broke(number))
      break_stream(peer, status);
  } else if (buffers_->owns(error.op_context)) {
    buffers_->repost(static_cast<ReceiveSlot*>(error.op_context));  // an oversized or broken message
  }
  // Otherwise the error is about something that a peer tried on us (a refused key): the peer's business.
}

void LibfabricRail::take_message(ReceiveSlot* slot, size_t length) {
  MessageHead head;
  if (!parse(slot->bytes, length, &head)) {
    buffers_->repost(slot);
    return;
  }
  const uint8_t* body = slot->bytes + kMessageHeadBytes;
  const size_t body_bytes = length - kMessageHeadBytes;
  if (head.kind != MessageKind::kPayload) {
    take_control_message(head, {reinterpret_cast<const char*>(body), body_bytes});
    buffers_->repost(slot);
    return;
  }
  if (shut_out_.holds(connection_tag(head.number))) {
    buffers_->repost(slot);
    return;
  }
  RailEvent event;
  event.kind = RailEventKind::kMessage;
  event.connection = head.number;
  event.data = body;
  event.length = static_cast<uint32_t>(body_bytes);
  emit(event, slot);
}

// A broken connection is not yet a dead peer: a target also hangs up on a refused key. A socket peer is dead when nobody listens
// at its address any more; asked once per burst of errors, on this path only. A process that is being killed loses its sockets one after
// the other, the later the more memory it has, so somebody who listens is no proof of life: that is in doubt until the peer confirms what
// is sent to it over a new connection, or its listener is gone as well. Not over rxm, which may swallow what is sent while it reconnects.
Status LibfabricRail::diagnose(PeerState& peer, int error) {
  const Status status = status_of_work(error);
  if (!device_->profile().over_sockets || !connection_broke(error)) return status;
  if (!peer.lost && now_ns() >= peer.next_probe_ns) {
    if (refuses_connections(peer.remote)) lose(peer);
    peer.next_probe_ns = now_ns() + kProbeAgainNs;
  }
  const bool layered = std::strstr(device_->info().fabric_attr->prov_name, "ofi_rxm") != nullptr;
  if (!layered && !peer.lost && !peer.closed && peer.doubted_until_ns == 0 && capabilities_.ordered &&
      device_->profile().acknowledged) {
    peer.doubted_until_ns = now_ns() + kDoubtNs;
    peer.next_probe_ns = 0;
    ++doubts_;
  }
  return peer.lost ? Status(StatusCode::kPeerDead, error) : Status(StatusCode::kTransport, error);
}

void LibfabricRail::lose(PeerState& peer) {
  peer.lost = true;
  end_doubt(peer, StatusCode::kPeerDead);
  if (peer.handle == nullptr) return;
  RailEvent event;
  event.kind = RailEventKind::kPeerLost;
  event.status = StatusCode::kPeerDead;
  event.peer = peer.handle;
  emit(event, nullptr);
}

void LibfabricRail::progress_into_stash() {
  const std::span<RailEvent> room = room_;
  const size_t filled = filled_;
  room_ = {};  // everything goes to the stash; the next poll hands it out
  filled_ = 0;
  while (read_cq(kReadAtOnce) == kReadAtOnce) {}
  buffers_->retry_reposts();
  advance_backlogs();
  room_ = room;
  filled_ = filled;
}

bool LibfabricRail::end_half_open(bool sleeps) {
  const bool forgets = std::strcmp(device_->info().fabric_attr->prov_name, "net") == 0;
  return half_open_.look(device_->endpoint_name(), forgets, sleeps);
}

bool LibfabricRail::prepare_wait() {
  if (!stash_.empty() || !handed_out_.empty() || cover_wanted_ || has_spare_paths() || doubts_ != 0) return false;
  // What waits for room is helped by completions alone.
  if (std::any_of(backlogged_.begin(), backlogged_.end(), [this](const PeerState* peer) {
        return peer->backlog == nullptr || has_room(*peer, *peer->backlog);
      }))
    return false;
  if (device_->profile().over_sockets && end_half_open(true)) return false;
  if (device_->wait_fd() < 0) return true;
  // Not every provider's fi_trywait looks into the CQ.
  if (read_cq(1) > 0) return false;  // it is in the stash now
  fid* fids[] = {&device_->cq()->fid};
  return fi_trywait(device_->fabric(), fids, 1) == 0;
}

}  // namespace asyncfabric::libfabric
