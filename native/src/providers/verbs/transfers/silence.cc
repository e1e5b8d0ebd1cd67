// silence.cc: devices that take requests and report nothing, and paths that must show that they carry. Under the engine lock.
// The verbs promise that each request completes. A device may break that: soft-RoCE's requester, when it meets an error behind requests
// that wait for an answer, stops without starting its timer again, so a pulled cable can leave a queue pair that never reports anything. So
// nothing here waits for a device alone: what falls silent is pushed into the error state, whose flush reports every request; what does
// not even flush is destroyed, which takes its requests out of the device for good, and they are reported then.
// Silence is what we looked at, as for peers: a process that was stopped itself must not take its own absence for the device's.
#include <algorithm>

#include "base/clock.h"
#include "providers/verbs/rail.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint64_t kLookNs = 50'000'000;
constexpr uint64_t kLongestLookGapNs =
    1'000'000'000;                             // a worker that sleeps wakes more often while anything is under way
constexpr uint64_t kPulledNs = 2'000'000'000;  // as long as devices themselves try by default
constexpr uint64_t kFlushNs = 2'000'000'000;
constexpr double kSlowest =
    1e-3;  // of the line's rate: a hundred senders to one port over a network that loses packets

}  // namespace

void VerbsRail::look_for_silence() {
  const uint64_t now = now_ns();
  if (now < next_look_ns_) return;
  next_look_ns_ = now + kLookNs;
  const uint64_t patience = uint64_t{device_->options().silence_ms} * 1'000'000;
  const uint64_t gap = std::min({now - std::exchange(looked_ns_, now), kLongestLookGapNs, patience / 4});
  uint64_t bytes = 0;  // of all peers: they share the line
  for (const auto& connection : table_)
    if (connection != nullptr)
      for (Lane& lane : connection->lanes)
        for (uint32_t at = lane.flushed; at != lane.tail; ++at) bytes += lane.at(at).length;
  const double bits_per_ns = std::max(device_->gbits_per_s(), 1.0) * kSlowest;
  const uint64_t active = patience + static_cast<uint64_t>(static_cast<double>(bytes) * 8 / bits_per_ns);
  const uint64_t ready = port_down_ ? std::min(kPulledNs, patience) : active;
  for (size_t slot = 0; slot < table_.size(); ++slot) {
    const std::shared_ptr<Connection> connection = table_[slot];
    if (connection == nullptr) continue;
    for (Lane& lane : connection->lanes) {
      if (!lane.pair.qp || !grows_silent(*connection, lane, gap)) continue;
      if (lane.state == LaneState::kReady && lane.silent_ns > ready)
        push_out(*connection, lane);
      else if (lane.state == LaneState::kBroken && lane.silent_ns > std::min(kFlushNs, patience))
        take_out(*connection, lane);
    }
  }
}

// Something of the lane is owed and nothing came since the last look: a completion, or the word that messages were taken.
bool VerbsRail::grows_silent(const Connection& connection, Lane& lane, uint64_t gap) {
  const bool credit = &lane == &connection.lanes[kSignalLane] && !connection.waiting.empty();
  const bool owed = lane.in_device() != 0 || (credit && !connection.may_send_message());
  const uint64_t received = uint64_t{lane.flushed} << 32 | connection.messages_taken;
  if (!owed || received != lane.received) {
    lane.received = received;
    lane.silent_ns = 0;
    return false;
  }
  lane.silent_ns += gap;
  return true;
}

// Into the error state: every request comes back now, and the queue pair is built again.
void VerbsRail::push_out(Connection& connection, Lane& lane) {
  lane.silent_ns = 0;
  ++figures_.silent_lanes;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  (void)device_->library().ibv_modify_qp(lane.pair.qp.get(), &attributes, IBV_QP_STATE);
  break_lane(connection, lane, {StatusCode::kTransport, IBV_WC_RESP_TIMEOUT_ERR}, true);
  if (lane.in_device() == 0) flushed(connection, lane, lane.tail);
}

// The flush does not come either.
void VerbsRail::take_out(Connection& connection, Lane& lane) {
  by_credit_qpn_.erase(lane.pair.qp->qp_num);
  lane.pair.qp.reset();
  stale_ += lane.in_device();
  flushed(connection, lane, lane.tail);
}

// A port is active before its network is: a bridge or a switch forwards a second later. Until something of ours was answered the engine
// had better use another rail: what is posted into that second uses up the device's tries. An empty write, which counts nothing and needs no
// key, asks the question; the device repeats it, and if it fails the lanes are built anew, which is an answer too.
void VerbsRail::ask_path(Connection& connection) {
  report_path(connection, true);
  connection.unproven = true;
  Lane& lane = connection.lanes[kSignalLane];
  if (!has_room(lane)) return;  // full: its requests will answer; broken: it is built anew
  append(connection, lane, {.kept = true}).opcode = IBV_WR_RDMA_WRITE;
  ring_doorbell();
}

void VerbsRail::path_answers(Connection& connection) {
  connection.unproven = false;
  if (std::all_of(connection.lanes.begin(), connection.lanes.end(),
                  [](const Lane& lane) { return lane.state == LaneState::kReady; }))
    report_path(connection, false);
}

}  // namespace asyncfabric::verbs
