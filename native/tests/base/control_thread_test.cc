// control_thread_test.cc: registration and connecting may take as long as they like; transfers go on meanwhile. The rail below does its
// control calls only when the test opens its gate, as a NIC that pins gigabytes or waits for an answer would.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>

#include "engine/control.h"
#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

// One gate for all rails of the test; closed gates hold control calls.
class Gate {
 public:
  void close() {
    const std::lock_guard<std::mutex> guard(mutex_);
    open_ = false;
  }
  void open() {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      open_ = true;
    }
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
  }
  bool someone_waits() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return waiting_ > 0 && !open_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int waiting_ = 0;
};

Gate& gate() {
  static Gate* only = new Gate;
  return *only;
}

class GatedRail final : public Rail {
 public:
  explicit GatedRail(const RailSpec& spec) : inner_(spec) {}
  const Capabilities& capabilities() const override { return inner_.capabilities(); }
  RailInfo info() const override { return inner_.info(); }
  std::string address() const override { return inner_.address(); }
  Status register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) override {
    gate().pass();
    return inner_.register_memory(memory, out, key);
  }
  Status narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) override {
    return inner_.narrow_key(memory, scope, key);
  }
  Status revoke_memory(LocalMemory& memory, uint64_t patience_ns, std::string* new_key) override {
    return inner_.revoke_memory(memory, patience_ns, new_key);
  }
  Status release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t patience_ns) override {
    return inner_.release_memory(memory, patience_ns);
  }
  Status connect(std::string_view address, uint64_t patience_ns, std::unique_ptr<RailPeer>* out) override {
    gate().pass();
    return inner_.connect(address, patience_ns, out);
  }
  Status attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                std::unique_ptr<RemoteMemory>* out) override {
    return inner_.attach(peer, key, patience_ns, out);
  }
  Status disconnect(RailPeer& peer) override { return inner_.disconnect(peer); }
  PostResult post(std::span<const WorkRequest> requests) override { return inner_.post(requests); }
  size_t poll(std::span<RailEvent> events) override { return inner_.poll(events); }
  int wait_fd() const override { return inner_.wait_fd(); }
  bool prepare_wait() override { return inner_.prepare_wait(); }
  void cancel_wait() override { inner_.cancel_wait(); }

 private:
  LoopbackRail inner_;
};

Status open_gated_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string*) {
  *out = std::make_unique<GatedRail>(spec);
  return {};
}

EngineConfig gated() {
  static const bool once = (add_provider("gated", open_gated_rail), true);
  (void)once;
  EngineConfig config;
  config.rails = {{"gated", "", {}}};
  config.polling = PollingMode::kAdaptive;
  return config;
}

// 200 writes, one after the other, while the gate is shut.
void expect_writes_go_on(Pair& pair, RegionId from, KeyId key) {
  ASSERT_TRUE(pair.until([] { return gate().someone_waits(); }));
  for (int i = 0; i < 200; ++i) {
    OpId op;
    const uint64_t write = pair.a->cookie();
    ASSERT_TRUE(pair.a->engine->submit_write(write, from, 0, 64, key, 0, kNoImm, &op).ok());
    ASSERT_TRUE(pair.until([&] { return pair.a->done.contains(write); }))
        << "write " << i << " waits for the control thread";
    EXPECT_TRUE(pair.a->done[write].status.ok());
  }
  EXPECT_TRUE(gate().someone_waits());
}

TEST(ControlThread, WhatStrangersAskForStandsBehindWhatOthersDo) {
  Control control;
  std::string detail;
  ASSERT_TRUE(control.start(&detail).ok()) << detail;
  gate().close();
  control.post([] { gate().pass(); });
  std::vector<int> order;  // strangers are negative
  for (int i = 1; i <= 3; ++i) control.post_behind([&order, i] { order.push_back(-i); });
  for (int i = 1; i <= 20; ++i) control.post([&order, i] { order.push_back(i); });
  std::promise<void> last;
  control.post_behind([&last] { last.set_value(); });
  gate().open();
  ASSERT_EQ(last.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  ASSERT_EQ(order.size(), 23u);
  const auto first = std::find(order.begin(), order.end(), -1) - order.begin();
  EXPECT_GT(first, 10) << "a stranger is served before others";
  EXPECT_LT(first, 20) << "a stranger is never served while others ask";
  EXPECT_EQ(std::vector<int>(order.end() - 2, order.end()), (std::vector<int>{-2, -3}));
}

TEST(ControlThread, WritesGoOnWhileARegistrationTakesItsTime) {
  Pair pair(gated());
  std::vector<uint8_t> source(64, 1), target(64, 0xee), large(1 << 20);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), 64, *pair.a);
  OpId op;
  const uint64_t first = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_write(first, from, 0, 64, key, 0, kNoImm, &op).ok());
  ASSERT_TRUE(pair.wait(*pair.a, first).status.ok());
  gate().close();
  const uint64_t slow = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_register(slow, large.data(), large.size(), kHostDevice, 3).ok());
  expect_writes_go_on(pair, from, key);
  EXPECT_FALSE(pair.a->done.contains(slow));
  gate().open();
  EXPECT_TRUE(pair.wait(*pair.a, slow).status.ok());
}

TEST(ControlThread, WritesGoOnWhileAConnectTakesItsTime) {
  Pair pair(gated());
  Party other(pair.config);
  std::vector<uint8_t> source(64, 1), target(64, 0xee);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), 64, *pair.a);
  OpId op;
  const uint64_t first = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_write(first, from, 0, 64, key, 0, kNoImm, &op).ok());
  ASSERT_TRUE(pair.wait(*pair.a, first).status.ok());
  gate().close();
  const uint64_t slow = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(slow, other.engine->address()).ok());
  expect_writes_go_on(pair, from, key);
  EXPECT_FALSE(pair.a->done.contains(slow));
  gate().open();
  EXPECT_TRUE(pair.wait(*pair.a, slow).status.ok());
}

}  // namespace
}  // namespace asyncfabric::testing
