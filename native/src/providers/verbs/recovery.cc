// recovery.cc: what happens when a request fails, and the news of the service thread. Helm.
//   a request fails -> its queue pair flushes: all later ones come back failed -> the queue pair is rebuilt with the peer -> go on
// The first failure has a name (a dead key, a peer that does not answer); what was flushed behind it did not leave or was not executed,
// unless the peer fell silent: then nobody knows (ambiguous), and the verdict waits until the peer shows that it lives by building a
// new queue pair with us, the engine's heartbeats declare it dead (disconnect), our port goes down, or the verdict's time is over.
#include <algorithm>
#include <bit>

#include "base/clock.h"
#include "providers/verbs/errors.h"
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
  tell_path(connection, true);
  if (port_down_) pass_verdict(connection, lane, StatusCode::kRailDown);
}

void VerbsRail::tell_path(Connection& connection, bool down) {
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

void VerbsRail::take_news() {
  for (News& news : handover_->news()) {
    switch (news.kind) {
      case NewsKind::kReady: take_ready(news); break;
      case NewsKind::kGivenUp: take_given_up(*news.connection, news.status); break;
      case NewsKind::kIncoming: incoming_[news.qpn] = {.qp = news.qp, .id = news.id, .window = news.credits}; break;
      case NewsKind::kIncomingGone: {
        incoming_.erase(news.qpn);
        shut_out_.erase(news.qpn);
        Job job;
        job.kind = JobKind::kForgotten;
        job.qpn = news.qpn;
        handover_->ask(std::move(job));
        break;
      }
      case NewsKind::kReceives: receives_->add(std::move(news.block)); break;
      case NewsKind::kReceivesLow:
        receives_->refill(true);
        receives_->rearm_limit();
        break;
      case NewsKind::kAbandoned: close(*news.connection, StatusCode::kPeerDead); break;
      case NewsKind::kPortDown: take_port_down(news.status); break;
      case NewsKind::kPortUp: take_port_up(); break;
      case NewsKind::kDeviceFailed: take_device_failed(news.status); break;
    }
  }
}

uint32_t VerbsRail::table_slot(const std::shared_ptr<Connection>& connection) {
  if (connection->slot != kNoSlot) return connection->slot;
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<uint32_t>(table_.size()));
    table_.emplace_back();
    generations_.push_back(0);
  }
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  table_[slot] = connection;
  return slot;
}

void VerbsRail::take_ready(News& news) {
  Connection& connection = *news.connection;
  if (connection.closed) return;  // its queue pairs go with the news
  connection.slot = table_slot(news.connection);
  for (size_t index = 0; index < kLanes; ++index) {
    if ((news.lanes >> index & 1) == 0) continue;
    Lane& lane = connection.lanes[index];
    pass_verdict(connection, lane, lane.broken);  // the peer lives, and nobody knows what it got
    if (connection.met) ++figures_.rebuilt_lanes;
    lane.pair = std::move(news.pairs[index]);
    lane.ring.resize(std::bit_ceil(lane.pair.sizes.sends));
    lane.head = lane.flushed = lane.tail = 0;
    lane.heard = ~0ull;
    lane.generation = ++generations_[connection.slot];
    lane.state = LaneState::kReady;
    if (index != kSignalLane) continue;
    connection.messages_sent = connection.messages_taken = 0;
    connection.window = news.credits;
    by_credit_qpn_[lane.pair.qp->qp_num] = &connection;
    for (uint32_t i = 0; i < kCreditReceives; ++i) post_credit_receive(lane.pair.qp.get());
  }
  connection.met = true;
  path_answers(connection);
  connection.waiting.insert(connection.waiting.begin(), connection.again.begin(), connection.again.end());
  connection.again.clear();
  if (!connection.waiting.empty() && !connection.listed) waiting_.push_back(&connection);
  connection.listed = !connection.waiting.empty();
}

void VerbsRail::take_given_up(Connection& connection, Status status) {
  if (connection.closed) return;
  RailPeer* handle = connection.abandoned.load(std::memory_order_acquire) ? nullptr : connection.handle;
  close(connection, status);
  if (handle == nullptr) return;
  RailEvent event;
  event.kind = RailEventKind::kPeerLost;
  event.status = status;
  event.peer = handle;
  events_.push({event});
}

void VerbsRail::take_port_down(Status status) {
  if (port_down_) return;
  port_down_ = true;
  pass_verdicts(status);
  RailEvent event;
  event.kind = RailEventKind::kRailDown;
  event.status = status;
  events_.push({event});
}

void VerbsRail::take_port_up() {
  if (!port_down_) return;  // some drivers say it twice
  port_down_ = false;
  for (const std::shared_ptr<Connection>& connection : table_)
    if (connection != nullptr) ask_path(*connection);
  RailEvent event;
  event.kind = RailEventKind::kRailUp;
  events_.push({event});
}

// What a failed device was given it will not report: its queue pairs go, which fences them, and each request ends by name at once.
void VerbsRail::take_device_failed(Status status) {
  take_port_down(status);
  const std::vector<std::shared_ptr<Connection>> connections = table_;
  for (const std::shared_ptr<Connection>& connection : connections)
    if (connection != nullptr) close(*connection, status);
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
