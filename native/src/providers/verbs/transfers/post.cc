// post.cc: from WorkRequest to doorbell. Requests of one lane that follow each other go out as one chain, and only its last asks for a
// completion: RC completes in order, so that one ends all of them. Messages that cannot go now wait here, data waits in the engine,
// which may send it over another rail.
#include <arpa/inet.h>

#include <algorithm>
#include <cstring>

#include "provider/request_check.h"
#include "providers/verbs/device/errors.h"
#include "providers/verbs/memory/memory.h"
#include "providers/verbs/rail.h"

namespace asyncfabric::verbs {
namespace {

constexpr size_t kHellos = 8;  // messages kept for a peer that was not reached yet: dead ones must not take all slots

uint64_t work_id(const Connection& connection, const Lane& lane, uint32_t position) {
  const uint64_t index = &lane == &connection.lanes[kBulkLane] ? kBulkLane : kSignalLane;
  return kind_bits(Kind::kSend) | index << 59 | uint64_t{lane.generation} << 51 | uint64_t{connection.slot} << 32 |
         position;
}

}  // namespace

Status VerbsRail::check(const WorkRequest& request) const {
  return check_request<RemoteRegion, Registration>(request, kPayloadBytes, capabilities_.max_request_bytes);
}

Lane& VerbsRail::lane_for(Connection& connection, const WorkRequest& request) const {
  const bool small = request.remote == nullptr && device_->options().qps > 1;
  return connection.lanes[small || request.kind == WorkKind::kSend ? kSignalLane : kBulkLane];
}

PostResult VerbsRail::post(std::span<const WorkRequest> requests) {
  for (size_t i = 0; i < requests.size(); ++i) {
    const WorkRequest& request = requests[i];
    Connection& connection = connection_of(request.peer);
    Status status = check(request);
    if (status.ok() && connection.closed) status = StatusCode::kPeerDead;
    if (!status.ok()) {
      emit_done(request.tag, status);
      continue;
    }
    bool taken = true;
    if (request.kind == WorkKind::kSend) {
      taken = take_message(connection, request);
    } else if (Lane& lane = lane_for(connection, request); has_room(lane)) {
      uint32_t rkey = 0;
      status = number_of(connection, request, &rkey);
      taken = status.code != StatusCode::kBusy;
      if (status.ok())
        post_work(connection, lane, request, rkey);
      else if (taken)
        emit_done(request.tag, status);
    } else {
      taken = false;
    }
    if (taken) continue;
    ring_doorbell();
    return {i, StatusCode::kBusy};
  }
  ring_doorbell();
  return {requests.size(), StatusCode::kOk};
}

// A key has a number in each life of its owner's device; the first request in a new one waits for it.
Status VerbsRail::number_of(Connection& connection, const WorkRequest& request, uint32_t* rkey) {
  if (request.remote == nullptr) return {};
  const std::shared_ptr<KeyNumber>& number = static_cast<const RemoteRegion*>(request.remote)->number;
  const uint64_t newest = number->newest.load(std::memory_order_acquire);
  *rkey = static_cast<uint32_t>(newest);
  if (newest >> 32 == connection.life)
    return number->gone.load(std::memory_order_acquire) ? StatusCode::kStaleKey : StatusCode::kOk;
  if (number->asked.exchange(true, std::memory_order_acq_rel)) return StatusCode::kBusy;
  Job job;
  job.kind = JobKind::kAskKey;
  job.connection = table_[connection.slot];
  job.key = number;
  handover_->ask(std::move(job));
  return StatusCode::kBusy;
}

// Room was looked for before.
ibv_send_wr& VerbsRail::append(Connection& connection, Lane& lane, const Record& record) {
  if (chain_.lane != &lane || chain_.count == device_->options().chain) ring_doorbell();
  chain_.lane = &lane;
  chain_.connection = &connection;
  ibv_send_wr& made = chain_.requests[chain_.count];
  made = {};
  made.wr_id = work_id(connection, lane, lane.tail);
  made.sg_list = &chain_.pieces[chain_.count];
  if (chain_.count != 0) chain_.requests[chain_.count - 1].next = &made;
  ++chain_.count;
  lane.at(lane.tail) = record;
  ++lane.tail;
  ++in_device_;
  return made;
}

void VerbsRail::post_work(Connection& connection, Lane& lane, const WorkRequest& request, uint32_t rkey) {
  const Record record{.tag = request.tag, .length = static_cast<uint32_t>(request.length), .quiet = !request.signalled};
  ibv_send_wr& made = append(connection, lane, record);
  made.opcode = request.kind == WorkKind::kRead ? IBV_WR_RDMA_READ
                : request.has_imm               ? IBV_WR_RDMA_WRITE_WITH_IMM
                                                : IBV_WR_RDMA_WRITE;
  made.imm_data = htonl(request.imm);
  if (request.remote != nullptr) {
    const MemoryKey& key = static_cast<const RemoteRegion*>(request.remote)->key;
    made.wr.rdma.remote_addr = key.base + request.remote_offset;
    made.wr.rdma.rkey = rkey;
  }
  if (request.length == 0) return;
  const auto* local = static_cast<const Registration*>(request.local);
  *made.sg_list = {reinterpret_cast<uint64_t>(request.address), static_cast<uint32_t>(request.length), local->lkey()};
  made.num_sge = 1;
  if (request.kind == WorkKind::kWrite && request.length <= lane.pair.sizes.inline_bytes && local->on_host())
    made.send_flags = IBV_SEND_INLINE;  // saves the device a trip to memory
}

// Each message is copied, also a small one: if its queue pair breaks it goes out again.
bool VerbsRail::take_message(Connection& connection, const WorkRequest& request) {
  if (free_sends_.empty() || (!connection.met && connection.waiting.size() >= kHellos)) return false;
  const WaitingMessage message{request.tag, free_sends_.back(), static_cast<uint32_t>(request.length),
                               !request.signalled};
  free_sends_.pop_back();
  if (request.length != 0) std::memcpy(send_bytes(message.send_slot), request.address, request.length);
  if (connection.waiting.empty() && has_room(connection.lanes[kSignalLane]) && connection.may_send_message()) {
    post_message(connection, message);
    return true;
  }
  connection.waiting.push_back(message);
  if (!connection.listed) waiting_.push_back(&connection);
  connection.listed = true;
  return true;
}

void VerbsRail::post_message(Connection& connection, const WaitingMessage& message) {
  Lane& lane = connection.lanes[kSignalLane];
  ibv_send_wr& made =
      append(connection, lane,
             {.tag = message.tag, .send_slot = message.send_slot, .length = message.length, .quiet = message.quiet});
  made.opcode = IBV_WR_SEND;
  *made.sg_list = {reinterpret_cast<uint64_t>(send_bytes(message.send_slot)), message.length, send_block_->mr->lkey};
  made.num_sge = message.length != 0 ? 1 : 0;
  if (message.length != 0 && message.length <= lane.pair.sizes.inline_bytes) made.send_flags = IBV_SEND_INLINE;
  ++connection.messages_sent;
}

void VerbsRail::advance_waiting() {
  if (waiting_.empty()) return;
  for (Connection* connection : waiting_) {
    const Lane& lane = connection->lanes[kSignalLane];
    while (!connection->waiting.empty() && has_room(lane) && connection->may_send_message()) {
      const WaitingMessage message = connection->waiting.front();
      connection->waiting.pop_front();
      post_message(*connection, message);
    }
    connection->listed = !connection->waiting.empty();
  }
  ring_doorbell();
  std::erase_if(waiting_, [](const Connection* connection) { return !connection->listed; });
}

void VerbsRail::ring_doorbell() {
  if (chain_.count == 0) return;
  Lane& lane = *chain_.lane;
  ibv_send_wr* bad = nullptr;
  chain_.requests[chain_.count - 1].send_flags |= IBV_SEND_SIGNALED;
  const int error = ibv_post_send(lane.pair.qp.get(), chain_.requests.data(), &bad);
  ++figures_.doorbells;
  figures_.work_requests += chain_.count;
  const size_t count = std::exchange(chain_.count, 0);
  chain_.lane = nullptr;
  if (error == 0) return;
  // The queue has room by our count and each request was checked, so this is the driver's own trouble. What it did not take has
  // failed; what it took may lack the completion that it asked for, so the queue pair is made to flush.
  const size_t posted = bad != nullptr ? static_cast<size_t>(bad - chain_.requests.data()) : 0;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  (void)device_->library().ibv_modify_qp(lane.pair.qp.get(), &attributes, IBV_QP_STATE);
  break_lane(*chain_.connection, lane, {StatusCode::kTransport, error}, false);
  const auto unsent = static_cast<uint32_t>(count - posted);
  for (uint32_t position = lane.tail - unsent; position != lane.tail; ++position) {
    Record& record = lane.at(position);
    if (!record.kept) emit_done(record.tag, {StatusCode::kTransport, error});
    if (record.send_slot != kNoSlot) free_sends_.push_back(record.send_slot);
  }
  lane.tail -= unsent;
  in_device_ -= unsent;
  if (lane.in_device() == 0) flushed(*chain_.connection, lane, lane.tail);
}

}  // namespace asyncfabric::verbs
