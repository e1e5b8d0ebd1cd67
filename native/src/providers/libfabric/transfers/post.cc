// post.cc: from WorkRequest to libfabric. A request that the provider cannot take now (the peer still connects, its queue is
// full) waits in its peer's backlog, so that one slow peer does not hold up the others of the rail.
#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "provider/request_check.h"
#include "providers/libfabric/device/errors.h"
#include "providers/libfabric/rail.h"

namespace asyncfabric::libfabric {
namespace {

constexpr uint32_t kMaxPerPeer = 2048;  // half of the contexts: a stuck peer leaves room for others
// Where completions wait for the target's word, it is asked for once in ask_every requests or so many bytes: more often costs the
// target a message each, more rarely drains the sender's window before the word comes.
constexpr uint64_t kAskBytes = 256 * 1024;
constexpr size_t kReserved = 256;  // contexts for the rail's own messages, without which others might never complete
constexpr size_t kUrgent = 64;     // of them for signs of life, and for one peer at most
constexpr uint64_t kKnockNs = 20'000'000;  // several times what a connection takes on one host
constexpr uint64_t kLongestPauseNs = 5'000'000;
constexpr uint32_t kMostUnmet = 448;  // messages to peers that have not taken any yet: strangers leave room for others

}  // namespace

Status LibfabricRail::check(const WorkRequest& request) const {
  constexpr uint64_t kAnyLength =
      ~0ull;  // rxm takes more than one message of the device holds; the engine never asks for it
  return check_request<RemoteRegion, Registration>(request, kPayloadBytes, kAnyLength);
}

Context* LibfabricRail::enlist(PeerState& peer, const WorkRequest& request, bool internal) {
  const size_t extra = request.urgent ? kUrgent : 0;
  const bool unmet = peer.last_sequence == 0;
  if (!internal && (peer.outstanding >= kMaxPerPeer + extra || contexts_->available() <= kReserved - extra))
    return nullptr;
  uint8_t* payload = nullptr;
  if (request.kind == WorkKind::kSend) {
    if (unmet && unmet_sends_ >= kMostUnmet) return nullptr;
    payload = buffers_->take_send_slot((internal || request.urgent) && !unmet);
    if (payload == nullptr) return nullptr;
  }
  Context* context = contexts_->take();
  if (context == nullptr) {
    if (payload != nullptr) buffers_->give_send_slot(payload);
    return nullptr;
  }
  context->peer = &peer;
  context->payload = payload;
  context->unmet = unmet && payload != nullptr;
  unmet_sends_ += context->unmet ? 1 : 0;
  context->tag = request.tag;
  context->bytes = request.kind == WorkKind::kSend ? 0 : request.length;
  context->status = Status();
  context->reported = !internal;
  context->quiet = !request.signalled;
  context->acknowledges =
      request.delivered || request.kind == WorkKind::kRead || request.kind == WorkKind::kSend || internal;
  context->barrier = context->submitted = context->done = false;
  if (request.urgent && peer.backlog != nullptr)
    peer.requests.insert_before(peer.backlog, context);
  else
    peer.requests.push_back(context);
  ++peer.outstanding;
  return context;
}

PostResult LibfabricRail::post(std::span<const WorkRequest> requests) {
  size_t accepted = 0;
  while (accepted < requests.size()) {
    const std::span<const WorkRequest> batch = requests.subspan(accepted, std::min(kBatch, requests.size() - accepted));
    const size_t taken = post_batch(batch);
    accepted += taken;
    if (taken < batch.size()) return {accepted, StatusCode::kBusy};
  }
  return {accepted, StatusCode::kOk};
}

// The last request of each peer in a batch asks for the target's word, unless an earlier question is still on its way. A message asks as
// well, except where one behind it in the batch does: a stream keeps order, so that one answer proves both.
std::bitset<LibfabricRail::kBatch> LibfabricRail::last_of_each_peer(std::span<const WorkRequest> batch) {
  std::bitset<kBatch> last;
  if (!device_->profile().acknowledged) return last;
  ++post_mark_;
  for (size_t i = batch.size(); i > 0; --i) {
    PeerState& peer = *state_of(batch[i - 1].peer);
    if (peer.post_mark != post_mark_)
      last.set(i - 1);
    else if (leaves_question(batch[i - 1]))
      peer.question_mark = post_mark_;
    peer.post_mark = post_mark_;
  }
  return last;
}

// A sign of life may leave before others of its batch, which wait for room.
bool LibfabricRail::leaves_question(const WorkRequest& request) const {
  return device_->profile().acknowledged && request.kind == WorkKind::kSend && !request.urgent && !request.delivered;
}

size_t LibfabricRail::post_batch(std::span<const WorkRequest> batch) {
  const std::bitset<kBatch> last = last_of_each_peer(batch);
  uint32_t budget = post_limits_.eager_posts != 0 ? post_limits_.eager_posts : ~0u;
  for (size_t i = 0; i < batch.size(); ++i) {
    const WorkRequest& request = batch[i];
    PeerState& peer = *state_of(request.peer);
    // The engine may not know yet that earlier requests failed: what it posts would arrive, and be counted, without them (INV-1).
    if ((peer.doubted_until_ns != 0 || !stash_.empty()) && request.kind != WorkKind::kSend) {
      cover_later();  // those before it may have left the question to it
      return i;
    }
    Context* context = enlist(peer, request, false);
    if (context == nullptr) {
      cover_later();
      return i;
    }
    Status status = check(request);
    if (status.ok() && (peer.closed || peer.lost)) status = StatusCode::kPeerDead;
    if (!status.ok()) {
      finish(*context, status);
      if (last.test(i)) cover_later();
      continue;
    }
    if (last.test(i))
      context->acknowledges |= peer.asks_in_flight == 0 || peer.question_mark == post_mark_;
    else if (leaves_question(request))
      context->acknowledges = false;
    if (request.kind == WorkKind::kSend) {
      encode(MessageHead{MessageKind::kPayload, peer.connection}, context->payload);
      std::memcpy(context->payload + kMessageHeadBytes, request.address, request.length);
    }
    if (!request.urgent && (peer.backlog != nullptr || budget == 0 || !has_room(peer, *context))) {
      push_backlog(peer, *context, request);
      continue;
    }
    const ssize_t error = submit(*context, request);
    if (error == 0) {
      budget -= budget != 0 ? 1 : 0;
    } else if (error == -FI_EAGAIN) {
      push_backlog(peer, *context, request);
      if (stream_vanished(peer)) break_stream(peer, diagnose(peer, FI_ECONNRESET));
    } else {
      finish(*context, status_of_work(static_cast<int>(-error)));
      if (last.test(i)) cover_later();
    }
  }
  return batch.size();
}

// The newest requests of a peer wait for the target's word and nothing that was posted since asks for it: ask by an empty write. What is in
// the backlog asks when it leaves, but a barrier leaves behind that word only, so the question goes before it.
void LibfabricRail::cover() {
  if (!cover_wanted_) return;
  cover_wanted_ = false;
  for (const std::shared_ptr<PeerState>& peer : peers_) {
    const bool queued = peer->backlog != nullptr;
    if (peer->closed || peer->lost || (queued && !peer->backlog->barrier) || peer->asks_in_flight > 0 ||
        peer->asked == peer->last_sequence)
      continue;
    WorkRequest request;
    request.urgent = queued;
    Context* context = enlist(*peer, request, true);
    if (context == nullptr) {
      cover_wanted_ = true;
      return;
    }
    push_backlog(*peer, *context, request);
  }
}

ssize_t LibfabricRail::submit(Context& context, const WorkRequest& request) {
  PeerState& peer = *context.peer;
  const Profile& profile = device_->profile();
  context.acknowledges |=
      profile.acknowledged && (peer.last_sequence - peer.asked >= profile.ask_every || peer.unasked_bytes >= kAskBytes);
  ssize_t error = 0;
  switch (request.kind) {
    case WorkKind::kWrite: error = submit_write(context, request); break;
    case WorkKind::kRead: {
      const auto* local = static_cast<const Registration*>(request.local);
      const MemoryKey& key = static_cast<const RemoteRegion*>(request.remote)->key;
      void* descriptor = local != nullptr ? local->descriptor() : buffers_->scratch_descriptor();
      void* into = const_cast<void*>(local != nullptr ? request.address : buffers_->scratch());
      error = fi_read(peer.endpoint, into, request.length, descriptor, peer.address, key.base + request.remote_offset,
                      key.key, &context.fi);
      break;
    }
    case WorkKind::kSend: error = submit_send(context, kMessageHeadBytes + request.length); break;
  }
  if (error != 0) return error;
  context.submitted = true;
  context.sequence = ++peer.last_sequence;
  if (context.acknowledges) {
    peer.asked = context.sequence;
    peer.unasked_bytes = 0;
    ++peer.asks_in_flight;
  } else {
    peer.unasked_bytes += request.length;
  }
  ++peer.submitted;
  peer.open_bytes += context.bytes;
  return 0;
}

bool LibfabricRail::has_room(const PeerState& peer, const Context& context) const {
  const uint64_t most = device_->profile().most_open_bytes;
  return most == 0 || peer.open_bytes == 0 || peer.open_bytes + context.bytes <= most;
}

ssize_t LibfabricRail::submit_send(Context& context, size_t bytes) {
  PeerState& peer = *context.peer;
  void* descriptor = buffers_->descriptor();
  if (!device_->profile().acknowledged || !context.acknowledges)
    return fi_send(peer.endpoint, context.payload, bytes, descriptor, peer.address, &context.fi);
  const iovec source{context.payload, bytes};
  const fi_msg message{&source, &descriptor, 1, peer.address, &context.fi, 0};
  return fi_sendmsg(peer.endpoint, &message, FI_DELIVERY_COMPLETE | FI_COMPLETION);
}

ssize_t LibfabricRail::submit_write(Context& context, const WorkRequest& request) {
  PeerState& peer = *context.peer;
  const auto* remote = static_cast<const RemoteRegion*>(request.remote);
  const auto* local = static_cast<const Registration*>(request.local);
  const uint64_t to = remote != nullptr ? remote->key.base + request.remote_offset : peer.remote.scratch_base;
  const uint64_t key = remote != nullptr ? remote->key.key : peer.remote.scratch_key;
  const void* from = local != nullptr ? request.address : buffers_->scratch();
  void* descriptor = local != nullptr ? local->descriptor() : buffers_->scratch_descriptor();
  const uint32_t tag = names_connections_ ? connection_tag(peer.connection) : 0;
  const uint64_t data = request.imm | uint64_t{tag} << 32;
  if (!context.acknowledges) {  // these two are the shortest ways through libfabric
    return request.has_imm
               ? fi_writedata(peer.endpoint, from, request.length, descriptor, data, peer.address, to, key, &context.fi)
               : fi_write(peer.endpoint, from, request.length, descriptor, peer.address, to, key, &context.fi);
  }
  const iovec source{const_cast<void*>(from), request.length};
  const fi_rma_iov target{to, request.length, key};
  const fi_msg_rma message{&source, &descriptor, 1, peer.address, &target, 1, &context.fi, data};
  return fi_writemsg(peer.endpoint, &message,
                     FI_DELIVERY_COMPLETE | FI_COMPLETION | (request.has_imm ? FI_REMOTE_CQ_DATA : 0));
}

// No question is on its way that could fail, and yet libfabric is connecting again: what only left may be lost.
bool LibfabricRail::stream_vanished(const PeerState& peer) const {
  return device_->profile().acknowledged && peer.asks_in_flight == 0 && peer.asked < peer.last_sequence;
}

// libfabric answers FI_EAGAIN both while it connects and after the connection was refused, and connects anew with each retry: over
// sockets it would go on so until the engine's deadline, with a core of its own. Nobody gets an address before its listener is
// open, so a listener that refuses is gone for good, as in diagnose().
void LibfabricRail::knock(PeerState& peer) {
  if (!device_->profile().over_sockets || peer.last_sequence != 0 || peer.lost || peer.closed || peer.handle == nullptr)
    return;
  const uint64_t now = now_ns();
  if (now < peer.next_knock_ns) return;
  if (peer.next_knock_ns != 0 && nobody_listens(peer.remote)) lose(peer);
  peer.next_knock_ns = now + kKnockNs;
}

Status LibfabricRail::send_control(PeerState& peer, MessageKind kind, uint64_t number, std::string_view body,
                                   bool barrier) {
  WorkRequest request;
  request.kind = WorkKind::kSend;
  request.length = body.size();
  Context* context = enlist(peer, request, true);
  if (context == nullptr) return StatusCode::kBusy;
  context->barrier = barrier;
  encode(MessageHead{kind, number}, context->payload);
  std::memcpy(context->payload + kMessageHeadBytes, body.data(), body.size());
  push_backlog(peer, *context, request);
  uint32_t budget = ~0u;
  advance_backlog(peer, &budget);
  return StatusCode::kOk;
}

void LibfabricRail::push_backlog(PeerState& peer, Context& context, const WorkRequest& request) {
  context.request = request;
  if (peer.backlog == nullptr || context.next == peer.backlog) peer.backlog = &context;
  if (!peer.in_backlog) {
    peer.in_backlog = true;
    backlogged_.push_back(&peer);
  }
}

void LibfabricRail::advance_backlog(PeerState& peer, uint32_t* budget) {
  while (peer.backlog != nullptr && *budget > 0) {
    Context* context = peer.backlog;
    if (context->barrier && peer.requests.head != context) {
      if (peer.asks_in_flight == 0 && peer.asked != peer.last_sequence) cover_later();
      return;
    }
    if (!has_room(peer, *context)) return;
    if (context->barrier) name_stream(*context);
    const ssize_t error = submit(*context, context->request);
    if (error == -FI_EAGAIN) {
      if (stream_vanished(peer)) break_stream(peer, diagnose(peer, FI_ECONNRESET));
      knock(peer);
      if (peer.last_sequence == 0) {
        const uint64_t now = now_ns();
        if (peer.first_try_ns == 0) peer.first_try_ns = now;
        peer.next_try_ns = now + std::min((now - peer.first_try_ns) / 8, kLongestPauseNs);
      }
      return;
    }
    --*budget;
    (void)peer.leave_backlog();
    if (error != 0) finish(*context, status_of_work(static_cast<int>(-error)));
  }
}

void LibfabricRail::advance_backlogs() {
  if (backlogged_.empty()) return;
  uint32_t budget = post_limits_.posts_per_pass != 0 ? post_limits_.posts_per_pass : ~0u;
  const uint64_t now = now_ns();
  for (PeerState* peer : backlogged_)
    if (now >= peer->next_try_ns) advance_backlog(*peer, &budget);
  std::erase_if(backlogged_, [](PeerState* peer) {
    if (peer->backlog == nullptr) peer->in_backlog = false;
    return !peer->in_backlog;
  });
  if (backlogged_.size() > 1)
    std::rotate(backlogged_.begin(), backlogged_.begin() + 1, backlogged_.end());  // share the limits
}

}  // namespace asyncfabric::libfabric
