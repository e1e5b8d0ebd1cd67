// nic_writes_test.cc: what NICs write to memory of a GPU is made visible before a counter releases its kernels, where the GPU does not order
// such writes itself: the call of a driver that this test replaces, and who makes the engine call it, and when.
#include <gtest/gtest.h>

#include "rigs/engine_pair.h"
#include "rigs/replaced_driver.h"

namespace asyncfabric::testing {
namespace {

// ---- the driver

int ordering = 0;
int flush_options = 0;
int flushes = 0;
int flush_answer = 0;
int contexts = 0;

cuda::Driver replaced_driver() {
  cuda::Driver driver = driver_that_opens();
  driver.cuDeviceGetAttribute = [](int* value, int which, cuda::CUdevice) {
    *value = which == cuda::kAttributeWritesOrdering ? ordering
             : which == cuda::kAttributeFlushOptions ? flush_options
                                                     : 1;
    return cuda::kSuccess;
  };
  driver.cuCtxPushCurrent_v2 = [](cuda::CUcontext) {
    ++contexts;
    return cuda::kSuccess;
  };
  driver.cuCtxPopCurrent_v2 = [](cuda::CUcontext*) {
    --contexts;
    return cuda::kSuccess;
  };
  driver.cuFlushGPUDirectRDMAWrites = [](int target, int scope) {
    EXPECT_EQ(contexts, 1) << "the call is about the current context";
    EXPECT_EQ(target, 0);
    EXPECT_EQ(scope, 100);
    ++flushes;
    return flush_answer;
  };
  return driver;
}

struct NicWritesDriver : ::testing::Test {
  NicWritesDriver() { ordering = flush_options = flushes = flush_answer = contexts = 0; }
};

TEST_F(NicWritesDriver, AreFlushedWhereTheGpuDoesNotOrderThem) {
  flush_options = 1;
  const cuda::Driver driver = replaced_driver();
  const auto device = open_device(driver);
  EXPECT_FALSE(device->orders_nic_writes());
  EXPECT_TRUE(device->flush_nic_writes().ok());
  EXPECT_EQ(flushes, 1);
  flush_answer = 719;
  EXPECT_EQ(device->flush_nic_writes().raw, cuda::raw_of(719));
  EXPECT_EQ(contexts, 0);
}

TEST_F(NicWritesDriver, AreLeftAloneWhereTheGpuOrdersThem) {
  flush_options = 1;
  const cuda::Driver driver = replaced_driver();
  for (ordering = 100; ordering <= 200; ordering += 100) {
    const auto device = open_device(driver);
    EXPECT_TRUE(device->orders_nic_writes());
    EXPECT_TRUE(device->flush_nic_writes().ok());
  }
  EXPECT_EQ(flushes, 0);
}

TEST_F(NicWritesDriver, ThatCannotBeFlushedAreUnsupported) {
  cuda::Driver driver = replaced_driver();
  EXPECT_EQ(open_device(driver)->flush_nic_writes().code, StatusCode::kUnsupported) << "streams alone can flush";
  flush_options = 1;
  driver.cuFlushGPUDirectRDMAWrites = nullptr;
  EXPECT_EQ(open_device(driver)->flush_nic_writes().code, StatusCode::kUnsupported) << "a driver before CUDA 11.3";
}

// ---- the engine: a writer with a NIC and a rail of its host; a target with both, and memory of a GPU

Status open_gpu_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail) {
  RailSpec loopback = spec;
  loopback.provider.clear();
  loopback.options.emplace_back("host", "1");
  return open_loopback_rail(loopback, out, detail);
}

struct NicWrites : ::testing::Test {
  NicWrites() : bytes(4096) {
    add_loopback();
    static const bool once = (add_provider("loopgpu", open_gpu_rail), true);
    (void)once;
    config.polling = PollingMode::kManual;
    config.rails = {{"loopgpu", "cuda:0", {}}, {"loopback", "", {}}};
    target = std::make_unique<Party>(config);
    gpu = std::prev(LoopbackHub::shared().rails.end(), 2)->second;
    gpu->flushing = [this] {
      flag_when_flushed = flag != nullptr ? *flag : 0;
      ++flushed;
      return answer;
    };
    config.rails = {{"loopback", "", {}}};
    far = std::make_unique<Party>(config);
    config.rails = {{"loopgpu", "cuda:1", {}}};
    near = std::make_unique<Party>(config);
    uint32_t imm = 0;
    EXPECT_TRUE(target->engine->open_counter(5, &counter, &imm).ok());
  }

  void turn() {
    for (Party* party : {target.get(), far.get(), near.get()}) {
      party->engine->step();
      party->take();
    }
  }
  void until(const std::function<bool()>& condition) {
    for (int turns = 0; !condition(); ++turns) {
      ASSERT_LT(turns, 1'000'000);
      turn();
    }
  }
  RegionId add_memory(int32_t device, uint32_t access) {
    const uint64_t cookie = target->cookie();
    EXPECT_TRUE(target->engine->submit_register(cookie, bytes.data(), bytes.size(), device, access).ok());
    until([&] { return target->done.contains(cookie); });
    EXPECT_TRUE(target->done[cookie].status.ok());
    return target->done[cookie].value;
  }
  void signal(Party& from) {
    const uint64_t connected = from.cookie();
    EXPECT_TRUE(from.engine->submit_connect(connected, target->engine->address()).ok());
    until([&] { return from.done.contains(connected); });
    OpId op = 0;
    const uint64_t cookie = from.cookie();
    const PeerId peer = from.done[connected].value;
    EXPECT_TRUE(from.engine->submit_signal(cookie, &peer, 1, 5, &op).ok());
    const uint64_t before = target->engine->counter_value(counter);
    until([&] { return target->engine->counter_value(counter) == before + 1; });
  }
  void take_flag() { ASSERT_TRUE(target->engine->counter_flag(counter, &flag).ok()); }

  EngineConfig config;
  std::vector<uint8_t> bytes;
  std::unique_ptr<Party> target, far, near;
  LoopbackRail* gpu = nullptr;
  CounterId counter = 0;
  uint64_t* flag = nullptr;
  uint64_t flag_when_flushed = 0;
  int flushed = 0;
  Status answer;
};

TEST_F(NicWrites, AreVisibleBeforeAFlagRises) {
  add_memory(0, 3);
  take_flag();
  flushed = 0;
  signal(*far);
  EXPECT_EQ(flushed, 1);
  EXPECT_EQ(flag_when_flushed, 0u) << "released before its bytes were visible";
  EXPECT_EQ(*flag, 1u);
}

TEST_F(NicWrites, ThatWereCountedBeforeThereWasAFlagAreVisibleBeforeItRises) {
  add_memory(0, 3);
  signal(*far);
  EXPECT_EQ(flushed, 0) << "nobody waits but the processor";
  take_flag();
  EXPECT_GE(flushed, 1);
  EXPECT_EQ(*flag, 1u);
}

TEST_F(NicWrites, OfOtherRailsAndToOtherMemoryCostNothing) {
  add_memory(kHostDevice, 3);
  add_memory(0, 2);  // peers may only read it
  const RegionId gone = add_memory(0, 3);
  const uint64_t cookie = target->cookie();
  ASSERT_TRUE(target->engine->submit_release(cookie, gone).ok());
  until([&] { return target->done.contains(cookie); });
  take_flag();
  signal(*far);
  EXPECT_EQ(flushed, 0) << "no NIC may write to the GPU";
  add_memory(0, 3);
  signal(*near);
  EXPECT_EQ(flushed, 0) << "no NIC wrote";
  EXPECT_EQ(*flag, 2u);
}

TEST_F(NicWrites, ThatCannotBeMadeVisibleReleaseNobody) {
  add_memory(0, 3);
  take_flag();
  answer = StatusCode::kTransport;
  signal(*far);
  signal(*near);
  EXPECT_EQ(*flag, 0u) << "the arrival of another rail counts the unseen bytes too";
  EXPECT_NE(target->engine->last_error().find("cuda:0"), std::string::npos) << target->engine->last_error();
  EXPECT_EQ(target->engine->counter_flag(counter, &flag).code, StatusCode::kTransport);
  answer = {};
  signal(*near);
  EXPECT_EQ(*flag, 3u);
}

}  // namespace
}  // namespace asyncfabric::testing
