// post.cc: legs at the front of a rail's queues become work requests, in batches. Under the engine lock.
#include <algorithm>

#include "engine/core.h"

namespace asyncfabric {

namespace {

using Made = PostBatch::Made;

// Pages [cursor, ...) that lie next to each other on both sides go out as one request; each still counts.
uint64_t page_run(const Op& op, const Leg& leg, uint64_t limit_bytes, uint64_t limit_pages) {
  uint64_t run = 1;
  while (leg.cursor + run < leg.end && run < limit_pages && (run + 1) * op.page_bytes <= limit_bytes) {
    const Page& last = op.pages[leg.cursor + run - 1];
    const Page& next = op.pages[leg.cursor + run];
    if (next.source != last.source + op.page_bytes || next.target != last.target + op.page_bytes) break;
    ++run;
  }
  return run;
}

// Pages of a list for a rail that takes them together: the engine's own cost is then per list, not per page.
uint64_t list_run(const Op& op, const Leg& leg, const Capabilities& can, uint64_t limit_pages) {
  constexpr uint64_t kMostBytes = 256ull << 20;
  const uint64_t fitting = std::max<uint64_t>(kMostBytes / op.page_bytes, 1);
  return std::min({leg.end - leg.cursor, limit_pages, uint64_t{can.list_pages}, fitting});
}

// One function for each kind of request: it sets what the next request of a leg moves, and moves the leg's cursor behind that.

void make_message(Op& op, Leg& leg, WorkRequest& request) {
  request.kind = WorkKind::kSend;
  request.address = op.payload.data();
  request.length = op.payload.size();
  leg.cursor = leg.end;
}

void make_range(Op& op, Leg& leg, const Capabilities& can, WorkRequest& request) {
  const Target& target = op.targets[leg.target];
  const bool long_ones = can.max_gpu_request_bytes != 0 && op.region->value.device != kHostDevice;
  request.length = std::min(leg.end - leg.cursor, long_ones ? can.max_gpu_request_bytes : can.max_request_bytes);
  request.address = op.region->value.base + target.source_offset + leg.cursor;
  request.remote_offset = target.key->value.offset + target.target_offset + leg.cursor;
  request.delivered = target.fenced;
  leg.cursor += request.length;
}

void make_page_list(Op& op, Leg& leg, const Capabilities& can, WorkRequest& request) {
  const uint64_t run = list_run(op, leg, can, kMaxWorth - leg.uncounted);
  request.address = op.region->value.base;
  request.remote_offset = op.targets[leg.target].key->value.offset;
  request.length = run * op.page_bytes;
  request.pages = &op.pages[leg.cursor];
  request.page_count = static_cast<uint32_t>(run);
  request.last_page = op.pages.most();
  request.page_bits = op.pages.bits();
  leg.cursor += run;
}

void make_pages(Op& op, Leg& leg, const Capabilities& can, WorkRequest& request) {
  // A page that is read counts nowhere, so no rail needs it in a request of its own.
  const bool joins = can.ordered || op.reads();
  const uint64_t run = joins ? page_run(op, leg, can.max_request_bytes, kMaxWorth - leg.uncounted) : 1;
  const Page& page = op.pages[leg.cursor];
  request.address = op.region->value.base + (op.reads() ? page.target : page.source);
  request.remote_offset = op.targets[leg.target].key->value.offset + (op.reads() ? page.source : page.target);
  request.length = run * op.page_bytes;
  if (joins && op.page_bytes > can.max_request_bytes) {
    // In parts, one behind the other: the page counts with the last of them.
    request.length = std::min(op.page_bytes - leg.page_done, can.max_request_bytes);
    request.address = static_cast<const uint8_t*>(request.address) + leg.page_done;
    request.remote_offset += leg.page_done;
    leg.page_done = (leg.page_done + request.length) % op.page_bytes;
  }
  if (leg.page_done == 0) leg.cursor += run;
}

// The engine has one rail, which gathers, so one leg: boxes are copied in their order, long ones in parts.
void make_box(Op& op, Leg& leg, const Capabilities& can, WorkRequest& request) {
  request.gather = &op.boxes;
  request.gathered = op.boxes.before(leg.cursor) + leg.page_done;
  request.address = op.region->value.base;
  request.length = std::min(op.boxes.bytes(leg.cursor) - leg.page_done, can.max_request_bytes);
  request.remote_offset = op.targets[leg.target].key->value.offset + op.boxes.target(leg.cursor) + leg.page_done;
  leg.page_done = (leg.page_done + request.length) % op.boxes.bytes(leg.cursor);
  if (leg.page_done == 0) ++leg.cursor;
}

void make_transfer(Op& op, Leg& leg, const Capabilities& can, uint32_t rail_index, WorkRequest& request) {
  const RegionEntry& region = op.region->value;
  request.kind = op.reads() ? WorkKind::kRead : WorkKind::kWrite;
  request.local = region.memory[rail_index].get();
  request.remote = op.targets[leg.target].key->value.lanes[leg.lane].get();
  if (op.kind == OpKind::kBoxes) return make_box(op, leg, can, request);
  if (!op.has_pages()) return make_range(op, leg, can, request);
  if (can.list_pages != 0 && can.ordered && region.device != kHostDevice) return make_page_list(op, leg, can, request);
  make_pages(op, leg, can, request);
}

// Logical arrivals of a request that carries all that it counts by itself; those of lists are added up by post().
uint32_t own_worth(const Op& op, const Leg& leg, const Capabilities& can) {
  if (leg.counts_only) return 1;
  if (op.imm == kNoImm || op.kind == OpKind::kSend || op.kind == OpKind::kBoxes) return 0;
  // One immediate can carry kMaxWorth pages; on an unordered rail each page carries its own.
  if (op.has_pages()) return can.ordered ? 0 : 1;
  return leg.cursor == leg.end && !op.targets[leg.target].fenced ? 1 : 0;
}

// Fills the next request of a leg and moves its cursor.
void make_request(Op& op, Leg& leg, const Capabilities& can, const Lane& lane, uint32_t rail_index,
                  uint32_t counter_generation, WorkRequest& request, Made& made) {
  made = {&leg, leg.cursor, leg.page_done, 0, 0};
  request = {};
  request.peer = lane.handle.get();
  if (leg.counts_only) {
    leg.cursor = leg.end;
  } else if (op.kind == OpKind::kSend) {
    make_message(op, leg, request);
    made.bytes = request.length - kUserHeadBytes;
  } else {
    make_transfer(op, leg, can, rail_index, request);
    made.bytes = request.length;
  }
  made.worth = own_worth(op, leg, can);
  if (made.worth != 0) {
    request.has_imm = true;
    request.imm = pack_imm(static_cast<uint32_t>(op.imm), counter_generation, made.worth);
    // An op that counts has ended when it was counted (closings.cc). Where nothing keeps order, that has to be asked for.
    request.delivered = request.delivered || !can.ordered;
  }
  // Only where post() has taken the bytes may a request go unreported: a dropped leg must know what is still in flight. What a read
  // brings may come later on any rail, so that each is reported.
  request.signalled = leg.cursor == leg.end || request.has_imm || !can.synchronous || op.reads();
}

}  // namespace

void Core::posted(Leg& leg, uint32_t rail_index, uint64_t bytes, bool signalled) {
  Op& op = *leg.op;
  Peer& peer = *op.targets[leg.target].peer;
  op.rails |= 1ull << rail_index;
  op.bytes_posted.store(op.bytes_posted.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  leg.sent.add(bytes);
  peer.bytes_sent.store(peer.bytes_sent.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  (op.reads() ? tallies.bytes_read : tallies.bytes_written).add(bytes);
  if (!signalled) return;
  ++leg.outstanding;
  ++peer.outstanding;
  op.outstanding.store(op.outstanding.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

size_t Core::post(uint32_t rail_index) {
  RailState& rail = *rails[rail_index];
  if (rail.urgent.empty() && rail.bulk.empty()) return 0;
  if (!rail.up.load(std::memory_order_relaxed)) return 0;
  const size_t most = rail.capabilities.step_requests;
  batch.make_room(most);
  auto& [requests, made] = batch;
  size_t count = 0;
  uint64_t bytes = 0;
  bundle_room.clear();
  for (LegQueue* queue : {&rail.urgent, &rail.bulk}) {
    Leg* last = nullptr;  // of those whose requests are made
    for (Leg* leg = queue->front(); leg != nullptr && count < most && bytes < rail.capabilities.step_bytes;
         leg = last->after) {
      Op& op = *leg->op;
      last = leg;
      Peer& peer = *op.targets[leg->target].peer;
      const uint32_t generation = op.targets[leg->target].generation;
      const bool batched = op.is_list() && op.imm != kNoImm && rail.capabilities.ordered;
      while (leg->cursor != leg->end && count < most && bytes < rail.capabilities.step_bytes) {
        WorkRequest& request = requests[count];
        make_request(op, *leg, rail.capabilities, peer.lanes[leg->lane], rail_index, generation, request, made[count]);
        if (batched) {
          leg->uncounted += static_cast<uint32_t>(leg->cursor - made[count].cursor_before);
          if (leg->cursor == leg->end || leg->uncounted >= kMaxWorth) {
            made[count].worth = leg->uncounted;
            leg->uncounted = 0;
            request.has_imm = true;
            request.signalled = true;
            request.imm = pack_imm(static_cast<uint32_t>(op.imm), generation, made[count].worth);
          }
        }
        request.tag = make_tag(op.generation.load(std::memory_order_relaxed), op.slot,
                               static_cast<uint32_t>(leg - op.legs.data()), request.signalled);
        if (op.kind == OpKind::kSend) last = bundle_room.gather(*leg, rail.capabilities.max_send_bytes, request);
        bytes += made[count].bytes;
        ++count;
      }
    }
  }

  const PostResult result = rail.rail->post({requests.data(), count});
  for (size_t i = count; i > result.accepted; --i) {
    // Not taken: as if it had never been made. Going backwards leaves the first cursor and the uncounted pages before it.
    Made& undone = made[i - 1];
    if (undone.leg->op->is_list() && undone.worth != 0 && rail.capabilities.ordered)
      undone.leg->uncounted = undone.worth;
    if (undone.leg->op->is_list() && undone.leg->op->imm != kNoImm && rail.capabilities.ordered)
      undone.leg->uncounted -= static_cast<uint32_t>(undone.leg->cursor - undone.cursor_before);
    BundleRoom::let_go(*undone.leg);
    undone.leg->cursor = undone.cursor_before;
    undone.leg->page_done = undone.page_done_before;
  }
  Leg* refused = result.accepted < count ? made[result.accepted].leg : nullptr;
  for (size_t i = 0; i < result.accepted; ++i) {
    if (requests[i].has_imm) tallies.immediates_sent.add(1);
    posted(*made[i].leg, rail_index, made[i].bytes, requests[i].signalled);
    if (Leg& leg = *made[i].leg; leg.cursor == leg.end && leg.queued && &leg != refused) queue_of(leg).remove(&leg);
    for (Leg* follower = made[i].leg->follower; follower != nullptr; follower = follower->follower) {
      follower->cursor = follower->end;
      posted(*follower, rail_index, follower->op->payload.size() - kUserHeadBytes, true);
      queue_of(*follower).remove(follower);
    }
  }
  tallies.work_requests.add(result.accepted);
  if (result.accepted != 0) trace.point(TracePoint::kPost, rail_index, result.accepted);
  if (refused != nullptr) {
    if (result.status.code != StatusCode::kBusy) {
      if (!send_again(*refused->op, *refused, result.status)) fail_target(*refused->op, refused->target, result.status);
      return result.accepted + 1;
    }
    // Busy for this peer: let the others of the queue go first next time.
    LegQueue& queue = queue_of(*refused);
    if (refused->queued && refused->after != nullptr) {
      queue.remove(refused);
      queue.push_back(refused);
    }
  }
  return result.accepted;
}

}  // namespace asyncfabric
