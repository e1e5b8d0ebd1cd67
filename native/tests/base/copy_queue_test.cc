// copy_queue_test.cc: which copies on a GPU become one, by the calls of a driver that this test replaces.
#include "providers/cuda/copy_queue.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "rigs/replaced_driver.h"

namespace asyncfabric::testing {
namespace {

struct Copied {
  uint64_t target, source, bytes;
  bool operator==(const Copied&) const = default;
};
std::vector<Copied> copied;

// As much of a driver as copies one by one need.
cuda::Driver copying_driver() {
  cuda::Driver driver = driver_that_opens();
  driver.cuMemHostAlloc = [](void** memory, size_t bytes, unsigned) {
    *memory = std::calloc(1, bytes);
    return cuda::kSuccess;
  };
  driver.cuMemFreeHost = [](void* memory) {
    std::free(memory);
    return cuda::kSuccess;
  };
  driver.cuStreamCreateWithPriority = [](cuda::CUstream*, unsigned, int) { return cuda::kSuccess; };
  driver.cuStreamSynchronize = [](cuda::CUstream) { return cuda::kSuccess; };
  driver.cuStreamWriteValue64_v2 = [](cuda::CUstream, cuda::CUdeviceptr, uint64_t, unsigned) { return cuda::kSuccess; };
  driver.cuMemcpyAsync = [](cuda::CUdeviceptr target, cuda::CUdeviceptr source, size_t bytes, cuda::CUstream) {
    copied.push_back({target, source, bytes});
    return cuda::kSuccess;
  };
  return driver;
}

TEST(CopyQueue, CopiesThatFollowEachOtherAreOneWithinTheSameMemoryOnly) {
  const cuda::Driver driver = copying_driver();
  const auto device = open_device(driver);
  ASSERT_NE(device, nullptr);
  std::string detail;
  std::unique_ptr<cuda::CopyQueue> queue;
  ASSERT_TRUE(cuda::CopyQueue::open(device, cuda::ListMode::kSingle, 1, &queue, &detail).ok()) << detail;
  LocalMemory here, neighbour;
  RemoteMemory there, next;
  constexpr uint64_t kMiB = 1 << 20, kTo = 1 << 30, kFrom = 2u << 30;
  copied.clear();
  const cuda::Ends ends[] = {{&here, &there}, {&here, &there}, {&neighbour, &there}, {&neighbour, &next}};
  for (uint64_t i = 0; i < std::size(ends); ++i)
    EXPECT_NE(queue->add(cuda::Way::kOut, kTo + i * kMiB, kFrom + i * kMiB, kMiB, ends[i]), 0u);
  queue->launch();
  const std::vector<Copied> wanted{
      {kTo, kFrom, 2 * kMiB}, {kTo + 2 * kMiB, kFrom + 2 * kMiB, kMiB}, {kTo + 3 * kMiB, kFrom + 3 * kMiB, kMiB}};
  EXPECT_EQ(copied, wanted);
  EXPECT_TRUE(queue->trouble().ok());
}

}  // namespace
}  // namespace asyncfabric::testing
