// engine_loop.cc: submit and poll in tight loops. Cookies start at kFirstCookie so that completions of somebody else's calls
// (control calls, messages) are distinguished and left alone.
#include "bench/engine_loop.h"

#include <array>
#include <thread>

#include "asyncfabric/bench.h"

namespace asyncfabric::bench {
namespace {

constexpr uint64_t kFirstCookie = 1ull << 62;
constexpr uint32_t kIdlePolls = 64;

// Counts the ops of this loop that ended, keeps the first failure.
class Harvest {
 public:
  explicit Harvest(Engine& engine, bool drive, uint64_t* samples_ns = nullptr)
      : engine_(engine), drive_(drive), samples_ns_(samples_ns) {}

  void take() {
    if (drive_) engine_.step();
    const size_t found = engine_.poll(batch_.data(), batch_.size());
    // Nothing there: on a machine with fewer cores than spinning threads the one that works must get its turn.
    if (!drive_ && found == 0 && ++idle_ > kIdlePolls) {
      std::this_thread::yield();
      idle_ = 0;
    }
    for (size_t i = 0; i < found; ++i) {
      const Completion& completion = batch_[i];
      if (completion.kind != CompletionKind::kOp || completion.cookie < kFirstCookie) continue;
      if (samples_ns_ != nullptr) samples_ns_[completion.cookie - kFirstCookie] = completion.duration_ns;
      if (!completion.status.ok() && status_.ok()) status_ = completion.status;
      ++ended_;
    }
  }

  uint64_t ended() const { return ended_; }
  Status status() const { return status_; }

 private:
  Engine& engine_;
  bool drive_;
  uint64_t* samples_ns_;
  std::array<Completion, 256> batch_;
  uint64_t ended_ = 0;
  uint32_t idle_ = 0;
  Status status_;
};

EngineLoopResult result_of(Status status, uint64_t started, uint64_t operations) {
  return {status, started, monotonic_ns(), operations};
}

// Submits until it is accepted: a full queue is not a failure, it means that the window was chosen larger than the queue.
template <typename Submit>
Status insist(Harvest& harvest, Submit submit) {
  for (;;) {
    const Status status = submit();
    if (status.code != StatusCode::kBusy) return status;
    harvest.take();
  }
}

Status stroke(Engine& engine, Harvest& harvest, const PingLoop& loop, uint64_t turn) {
  OpId op = 0;
  return insist(harvest, [&] {
    if (loop.op_bytes == 0) return engine.submit_signal(kFirstCookie + turn, &loop.peer, 1, loop.imm, &op);
    return engine.submit_write(kFirstCookie + turn, loop.region, 0, loop.op_bytes, loop.key, 0, loop.imm, &op);
  });
}

}  // namespace

EngineLoopResult write_loop(Engine& engine, const WriteLoop& loop) {
  Harvest harvest(engine, loop.drive, loop.samples_ns);
  const uint64_t slots = loop.region_bytes / loop.op_bytes;
  const uint64_t started = monotonic_ns();
  uint64_t submitted = 0;
  uint64_t slot = 0;
  while (harvest.ended() < loop.count) {
    // Fill the window, then look once: taking completions in batches is what a busy caller does.
    while (submitted < loop.count && submitted - harvest.ended() < loop.window) {
      const uint64_t offset = slot * loop.op_bytes;
      OpId op = 0;
      const Status status = insist(harvest, [&] {
        return engine.submit_write(kFirstCookie + submitted, loop.region, offset, loop.op_bytes, loop.key, offset,
                                   loop.imm, &op);
      });
      if (!status.ok()) return result_of(status, started, harvest.ended());
      ++submitted;
      if (++slot == slots) slot = 0;
    }
    harvest.take();
  }
  return result_of(harvest.status(), started, harvest.ended());
}

EngineLoopResult pages_loop(Engine& engine, RegionId region, KeyId key, const PageBatch& pages, uint64_t rounds,
                            int64_t imm, bool drive, uint64_t* samples_ns) {
  Harvest harvest(engine, drive, samples_ns);
  const uint64_t started = monotonic_ns();
  for (uint64_t round = 0; round < rounds; ++round) {
    OpId op = 0;
    const Status status =
        insist(harvest, [&] { return engine.submit_write_pages(kFirstCookie + round, region, key, pages, imm, &op); });
    if (!status.ok()) return result_of(status, started, harvest.ended());
    while (harvest.ended() <= round) harvest.take();
  }
  return result_of(harvest.status(), started, harvest.ended());
}

EngineLoopResult spin_loop(Engine& engine, CounterId counter, uint64_t target, uint64_t deadline_ns) {
  const uint64_t started = monotonic_ns();
  uint64_t value = 0;
  const Status status = engine.spin_counter(counter, target, deadline_ns, &value);
  return result_of(status, started, value);
}

EngineLoopResult ping_loop(Engine& engine, const PingLoop& loop, uint64_t* samples_ns) {
  Harvest harvest(engine, loop.drive);
  const uint64_t started = monotonic_ns();
  uint64_t before = started;
  for (uint64_t turn = 0; turn < loop.count; ++turn) {
    Status status = stroke(engine, harvest, loop, turn);
    uint64_t value = 0;
    if (status.ok())
      status = engine.spin_counter(loop.counter, loop.base + turn + 1, before + loop.deadline_ns, &value);
    if (!status.ok()) return result_of(status, started, turn);
    const uint64_t now = monotonic_ns();
    samples_ns[turn] = now - before;
    before = now;
    harvest.take();
  }
  const uint64_t finished = monotonic_ns();
  while (harvest.ended() < loop.count && harvest.status().ok()) harvest.take();
  return {harvest.status(), started, finished, loop.count};
}

EngineLoopResult pong_loop(Engine& engine, const PingLoop& loop) {
  Harvest harvest(engine, loop.drive);
  const uint64_t started = monotonic_ns();
  for (uint64_t turn = 0; turn < loop.count; ++turn) {
    uint64_t value = 0;
    Status status = engine.spin_counter(loop.counter, loop.base + turn + 1, monotonic_ns() + loop.deadline_ns, &value);
    if (status.ok()) status = stroke(engine, harvest, loop, turn);
    if (!status.ok()) return result_of(status, started, turn);
    harvest.take();
  }
  while (harvest.ended() < loop.count && harvest.status().ok()) harvest.take();
  return result_of(harvest.status(), started, loop.count);
}

}  // namespace asyncfabric::bench
