// gate.cuh: between the two halves of a step where ranks are behind a proxy. One warp: notifies the proxy that this rank's part has been
// packed, and waits for what the others' proxies send, so that no multiprocessor is held while bytes are on the wire. The engine
// counts arrivals into words that the warp reads; it writes as soon as the word that asks for it is there. No Python in between.
#pragma once
#include "words.cuh"

namespace moe {

struct Gate {
  uint32_t back;  // 0: of dispatch, 1: of combine
  uint32_t roles;
};

__device__ inline Arrival* arrival_of(const Exchange& ex, Kind kind, uint32_t rank, uint32_t step) {
  return ex.arrivals + (kind * ex.ranks + rank) * ex.in_flight + (step - 1) % ex.in_flight;
}

// Whole warp: waits for one more arrival of `kind` from the rank of each lane that has one.
__device__ inline bool await_arrival(const Exchange& ex, bool mine, Kind kind, uint32_t rank, uint32_t step, Wait what,
                                     const uint32_t* lost) {
  Arrival* const arrival = mine ? arrival_of(ex, kind, rank, step) : nullptr;
  const uint64_t target = mine ? arrival->seen + 1 : 0;
  const bool came = wait_until(
      ex, mine, rank, what, [&] { return load_acquire(arrival->flag) >= target; },
      [&] { return load_acquire(lost) != 0; });
  if (came && mine) arrival->seen = target;
  return came;
}

// Whole warp: waits until the proxy has noted that nothing reads the parcels of step `step` for these ranks any more.
__device__ inline bool await_settled(const Exchange& ex, bool mine, const uint32_t* word, uint32_t step, uint32_t rank,
                                     Wait what) {
  return wait_until(ex, mine, rank, what, [&] { return load_acquire(word) >= step; }, [] { return false; });
}

__device__ inline void gate(const Exchange& ex, const Gate& go) {
  const uint32_t lane = lane_of(), rank = lane;
  const bool mine = lane < ex.ranks && is_proxied(ex, lane);
  if (is_broken(ex)) return;
  if (go.roles & kSend) {
    const uint32_t step = *static_cast<volatile uint32_t*>(&ex.state->step[go.back ? kCombineSend : kDispatchSend]);
    if (mine && !go.back) {
      out<Head>(ex, rank, step, ex.head)->rows = ex.state->packed[rank];
      ex.state->packed[rank] = 0;
    }
    __threadfence_system();
    __syncwarp();
    if (lane == 0) store_release(ex.reported[go.back], step);
  }
  if (!(go.roles & kReceive)) return;
  const uint32_t step = step_now(ex, go.back ? kCombineReceive : kDispatchReceive);
  const uint32_t turn = (step - 1) % ex.in_flight;
  const uint32_t* const notes = ex.notes + rank * (1 + 2 * ex.in_flight);
  const uint32_t *const lost = notes, *const settled_there = notes + 1,
                        *const settled_back = settled_there + ex.in_flight;
  if (go.back) {
    // The next dispatch of this turn packs into the same parcels: the write of this one has to be over.
    if (await_arrival(ex, mine, kReturn, rank, step, kBack, lost))
      await_settled(ex, mine, settled_there + turn, step, rank, kBack);
    return;
  }
  if (!await_arrival(ex, mine, kThere, rank, step, kRecord, lost)) return;
  const bool more = mine && load_acquire(&in<Head>(ex, rank, step, ex.head)->rows) > ex.private_tokens;
  if (!await_arrival(ex, more, kRest, rank, step, kToken, lost)) return;
  // The combine of this step packs where that of step - in_flight did.
  if (step > ex.in_flight) await_settled(ex, mine, settled_back + turn, step - ex.in_flight, rank, kHead);
}

}  // namespace moe
