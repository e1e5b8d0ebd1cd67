// engine_loop.h: the engine driven by bare native loops, without Python: what the engine itself costs.
// Uses include/asyncfabric/engine.h only, as any program that links the library could. Runs on the calling thread, which
// must be the engine's one consumer of completions while a loop runs. `drive`: the engine has no worker (manual polling),
// so the loop calls step().
#pragma once

#include <cstdint>

#include "asyncfabric/engine.h"

namespace asyncfabric::bench {

struct EngineLoopResult {
  Status status;            // the first failure, of a submission or of an op
  uint64_t started_ns = 0;  // CLOCK_MONOTONIC, comparable between the processes of one host
  uint64_t finished_ns = 0;
  uint64_t operations = 0;  // completed
};

// `count` writes with at most `window` in flight, walking round the region. `samples_ns`: null, or room for `count` durations
// (submission to completion, as the engine reports them).
struct WriteLoop {
  RegionId region = 0;
  KeyId key = 0;
  uint64_t region_bytes = 0;
  uint64_t op_bytes = 0;
  uint64_t window = 0;
  uint64_t count = 0;
  int64_t imm = kNoImm;
  bool drive = false;
  uint64_t* samples_ns = nullptr;
};
EngineLoopResult write_loop(Engine& engine, const WriteLoop& loop);

// `rounds` calls of submit_write_pages with the same list, one after the other.
EngineLoopResult pages_loop(Engine& engine, RegionId region, KeyId key, const PageBatch& pages, uint64_t rounds,
                            int64_t imm, bool drive, uint64_t* samples_ns);

// Waits with spin_counter until `target` arrivals were counted. finished_ns is when they were.
EngineLoopResult spin_loop(Engine& engine, CounterId counter, uint64_t target, uint64_t deadline_ns);

// Ping: signal (op_bytes 0) or write of op_bytes with imm, then spin_counter for the answer. Pong: the other way round.
// `base` is the value of the own counter before the first round.
struct PingLoop {
  PeerId peer = 0;
  RegionId region = 0;  // op_bytes > 0 only
  KeyId key = 0;        // op_bytes > 0 only
  uint64_t op_bytes = 0;
  CounterId counter = 0;
  uint64_t base = 0;
  int64_t imm = 0;
  uint64_t count = 0;
  uint64_t deadline_ns = 0;  // from now, for one round
  bool drive = false;
};
EngineLoopResult ping_loop(Engine& engine, const PingLoop& loop, uint64_t* samples_ns);
EngineLoopResult pong_loop(Engine& engine, const PingLoop& loop);

}  // namespace asyncfabric::bench
