// cuda_dmabuf_test.cc: memory of a GPU as a dma-buf, which rails of NICs are shown: the range it holds, how long it is open, and what is
// refused. Needs a GPU whose driver exports dma-bufs; that a NIC takes one is not tested here.
#include <dirent.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "providers/cuda/driver.h"
#include "providers/cuda/rail.h"
#include "rigs/engine_pair.h"

namespace asyncfabric {
Status open_cuda_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);
}

namespace asyncfabric::testing {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr int kAttributeDmaBuf = 124;

std::string target_of(const std::string& link) {
  char text[256] = {};
  return readlink(link.c_str(), text, sizeof text - 1) > 0 ? text : "";
}

size_t open_dmabufs() {
  size_t count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  for (const dirent* entry = readdir(folder); entry != nullptr; entry = readdir(folder))
    count += target_of(std::string("/proc/self/fd/") + entry->d_name).find("dmabuf") != std::string::npos ? 1 : 0;
  closedir(folder);
  return count;
}

struct DmaBuf : ::testing::Test {
  void SetUp() override {
    std::string detail;
    const Status status = open_cuda_rail({"cuda", "0", {}}, &rail, &detail);
    if (!status.ok()) GTEST_SKIP() << "NO DMA-BUF TEST WAS RUN: " << detail;
    const cuda::Driver* const driver = cuda::open_driver(&detail);
    int exports = 0;
    driver->cuDeviceGetAttribute(&exports, kAttributeDmaBuf, 0);
    if (exports == 0) GTEST_SKIP() << "NO DMA-BUF TEST WAS RUN: the driver exports none here";
    ASSERT_TRUE(rail->gpu()->allocate_memory(3 * kMiB, 0, &memory).ok()) << rail->why();
  }
  char* base() const { return static_cast<char*>(memory->base()); }

  std::unique_ptr<Rail> rail;
  std::unique_ptr<DeviceMemory> memory;
};

TEST_F(DmaBuf, HoldsWholePagesAroundTheRange) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (const auto& [begin, length] : {std::pair<uint64_t, uint64_t>{0, 3 * kMiB}, {12345, kMiB}, {2 * kMiB + 1, 1}}) {
    UniqueFd buffer;
    uint64_t offset = 0;
    const Status status = rail->gpu()->export_dmabuf(base() + begin, length, &buffer, &offset);
    ASSERT_TRUE(status.ok()) << status.raw;
    EXPECT_EQ(offset, begin % page);
    const off_t size = lseek(buffer.get(), 0, SEEK_END);
    EXPECT_EQ(static_cast<uint64_t>(size), (offset + length + page - 1) / page * page);
    EXPECT_EQ(open_dmabufs(), 1u) << target_of("/proc/self/fd/" + std::to_string(buffer.get()));
  }
  EXPECT_EQ(open_dmabufs(), 0u) << "closed with its holder";
}

TEST_F(DmaBuf, OfOtherMemoryIsRefused) {
  static char host[8192];
  UniqueFd buffer;
  uint64_t offset = 0;
  for (const auto& [start, length] :
       {std::pair<void*, uint64_t>{host, 4096}, {base(), 1ull << 40}, {base() + 64 * kMiB, kMiB}}) {
    const Status status = rail->gpu()->export_dmabuf(start, length, &buffer, &offset);
    EXPECT_EQ(status.code, StatusCode::kUnsupported);
    EXPECT_NE(status.raw, 0);
    EXPECT_FALSE(buffer);
  }
  EXPECT_EQ(open_dmabufs(), 0u);
}

// The loopback rail stands where a NIC's would: it takes any memory, and notes what it was shown.
TEST_F(DmaBuf, IsShownToTheOtherRailsAndOpenAsLongAsTheRegion) {
  memory.reset();
  rail.reset();
  add_loopback();
  EngineConfig config;
  config.rails = {{"cuda", "0", {}}, {"loopback", "", {}}};
  config.polling = PollingMode::kManual;
  Party party(config);
  ASSERT_NE(party.engine, nullptr);
  const auto ended = [&](uint64_t cookie) {
    while (!party.done.contains(cookie)) {
      party.engine->step();
      party.take();
    }
    return party.done[cookie];
  };
  const uint64_t made = party.cookie();
  ASSERT_TRUE(party.engine->submit_allocate(made, 3 * kMiB, 0, 3).ok());
  const Completion region = ended(made);
  ASSERT_TRUE(region.status.ok()) << party.engine->last_error();
  EXPECT_EQ(open_dmabufs(), 1u);
  EXPECT_GE(LoopbackHub::shared().rails.rbegin()->second->shown_dmabuf(), 0);
  const uint64_t gone = party.cookie();
  ASSERT_TRUE(party.engine->submit_release(gone, region.value).ok());
  EXPECT_TRUE(ended(gone).status.ok());
  EXPECT_EQ(open_dmabufs(), 0u);
}

}  // namespace
}  // namespace asyncfabric::testing
