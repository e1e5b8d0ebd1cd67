// recovery.cc: what happens when a request fails, and how connections end. Under the engine lock.
//   a request fails -> its queue pair flushes: all later ones come back failed -> the queue pair is rebuilt with the peer -> go on
// The first failure has a name (a dead key, a peer that does not answer); what was flushed behind it did not leave or was not executed,
// unless the peer fell silent: then nobody knows (ambiguous), and the verdict waits until the peer shows that it lives by building a
// new queue pair with us, the engine's heartbeats declare it dead (disconnect), our port goes down, or the verdict's time is over.
#include <algorithm>
#include <bit>

#include "base/clock.h"
#include "providers/verbs/device/errors.h"
#include "providers/verbs/rail.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint64_t kVerdictNs = 6'000'000'000;  // longer than the engine waits for a silent peer

}  // namespace

void VerbsRail::complete(Connection& connection, Lane& lane, uint32_t position, ibv_wc_status status) {
  if (position - lane.flushed >= lane.in_device()) return;      // not one of ours
  if (status == IBV_WC_SUCCESS && lane.head == lane.flushed) {  // also while we push it out: it was faster than that
    in_device_ -= position + 1 - lane.flushed;
    lane.flushed = position + 1;
    end_records(lane, position + 1, {});
    if (connection.unproven) path_answers(connection);
    if (lane.state == LaneState::kBroken) flushed(connection, lane, lane.flushed);
    return;
  }
  if (lane.state == LaneState::kReady) {
    in_device_ -= position - lane.flushed;
    lane.flushed = position;
    end_records(lane, position, {});  // RC is in order: what came before it was good
    break_lane(connection, lane, status_of_work(status), !peer_answered(status));
  }
  flushed(connection, lane, position + 1);
}

void VerbsRail::break_lane(Connection& connection, Lane& lane, Status status, bool peer_silent) {
  lane.state = LaneState::kBroken;
  lane.broken = status;
  if (!peer_silent) return;
  lane.broken = {StatusCode::kAmbiguous, status.raw};
  lane.awaits_peer = true;
  lane.verdict_until = now_ns() + kVerdictNs;
  awaiting_.emplace_back(&connection, &lane);
  report_path(connection, true);
  if (port_down_) pass_verdict(connection, lane, StatusCode::kRailDown);
}

void VerbsRail::report_path(Connection& connection, bool down) {
  if (connection.path_down == down || connection.abandoned.load(std::memory_order_acquire)) return;
  connection.path_down = down;
  RailEvent event;
  event.kind = down ? RailEventKind::kPathDown : RailEventKind::kPathUp;
  event.peer = connection.handle;
  events_.push({event});
}

// Everything before `until` is out of the device.
void VerbsRail::flushed(Connection& connection, Lane& lane, uint32_t until) {
  in_device_ -= until - lane.flushed;
  for (; lane.flushed != until; ++lane.flushed) keep_message(connection, lane.at(lane.flushed));
  if (!lane.awaits_peer && lane.head != lane.flushed) {
    end_records(lane, lane.head + 1, lane.broken);
    if (lane.broken.code != StatusCode::kRailDown) lane.broken = {StatusCode::kTransport, IBV_WC_WR_FLUSH_ERR};
    end_records(lane, lane.flushed, lane.broken);
  }
  if (lane.in_device() != 0 || lane.state != LaneState::kBroken || connection.closed) return;
  if (lane.pair.qp) by_credit_qpn_.erase(lane.pair.qp->qp_num);
  Job job;
  job.kind = JobKind::kRebuild;
  job.connection = table_[connection.slot];
  job.lanes = static_cast<uint8_t>(1u << (&lane - connection.lanes.data()));
  job.old = std::exchange(lane.pair, {});
  lane.state = LaneState::kBuilding;
  handover_->ask(std::move(job));
}

// A message may come twice but must not get lost: the engine numbers what must not be taken twice. So what a broken queue pair gives back
// goes out again over the next one, before those that wait.
void VerbsRail::keep_message(Connection& connection, Record& record) {
  if (record.send_slot == kNoSlot || connection.closed) return;
  connection.again.push_back({record.tag, record.send_slot, record.length, record.quiet});
  record.kept = true;
}

void VerbsRail::pass_verdict(Connection& connection, Lane& lane, Status status) {
  if (!lane.awaits_peer) return;
  lane.awaits_peer = false;
  lane.broken = status;
  std::erase(awaiting_, std::pair(&connection, &lane));
  end_records(lane, lane.flushed, status);
}

void VerbsRail::pass_verdicts(Status status) {
  while (!awaiting_.empty()) pass_verdict(*awaiting_.back().first, *awaiting_.back().second, status);
}

void VerbsRail::look_at_verdicts() {
  const uint64_t now = now_ns();
  for (size_t i = awaiting_.size(); i > 0; --i) {
    const auto [connection, lane] = awaiting_[i - 1];
    if (now >= lane->verdict_until) pass_verdict(*connection, *lane, lane->broken);
  }
}

Status VerbsRail::disconnect(RailPeer& peer) {
  close(connection_of(&peer), StatusCode::kPeerDead);
  return {};
}

// At once for what is reported, and for good when the service thread has destroyed its queue pairs and refuses others.
void VerbsRail::shut_out(uint64_t connection) {
  if (handover_->has_news()) take_news();
  for (const auto& [qpn, incoming] : incoming_)
    if (incoming.id == connection) shut_out_.insert(qpn);
  Job job;
  job.kind = JobKind::kShutOut;
  job.id = connection;
  handover_->ask(std::move(job));
}

// Destroying a queue pair takes its requests out of the device for good, so they may be reported at once.
void VerbsRail::close(Connection& connection, Status status) {
  if (connection.closed) return;
  connection.closed = true;
  for (Lane& lane : connection.lanes) {
    if (lane.pair.qp) by_credit_qpn_.erase(lane.pair.qp->qp_num);
    lane.pair.qp.reset();
    lane.state = LaneState::kBuilding;
    in_device_ -= lane.in_device();
    stale_ += lane.in_device();
    lane.flushed = lane.tail;
    if (lane.awaits_peer) std::erase(awaiting_, std::pair(&connection, &lane));
    lane.awaits_peer = false;
    end_records(lane, lane.tail, status);
  }
  for (auto* messages : {&connection.again, &connection.waiting}) {
    for (const WaitingMessage& message : *messages) {
      emit_done(message.tag, status);
      free_sends_.push_back(message.send_slot);
    }
    messages->clear();
  }
  connection.listed = false;
  std::erase(waiting_, &connection);
  std::shared_ptr<Connection> self;
  if (connection.slot != kNoSlot) {
    self = std::exchange(table_[connection.slot], nullptr);
    free_slots_.push_back(connection.slot);
    for (Lane& lane : connection.lanes) lane.generation = 0;
  }
  Job job;
  job.kind = JobKind::kClose;
  job.id = connection.id;
  handover_->ask(std::move(job));
}

}  // namespace asyncfabric::verbs
