// memory_room_test.cc: what control groups of both versions leave, read from a folder that looks like a machine.
#include "base/memory_room.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace asyncfabric {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class MemoryRoomTest : public ::testing::Test {
 protected:
  MemoryRoomTest() : root_(::testing::TempDir() + "memory-room-" + std::to_string(getpid())) {
    put("proc/meminfo", "MemTotal:       1048576 kB\nSwapFree:             0 kB\n");
  }
  ~MemoryRoomTest() override { std::filesystem::remove_all(root_); }

  void put(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + "/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  const std::string root_;
};

TEST_F(MemoryRoomTest, WithoutGroupsItIsTheMachine) { EXPECT_EQ(memory_room_bytes(root_), 1024 * kMiB); }

TEST_F(MemoryRoomTest, SwapCountsToo) {
  put("proc/meminfo", "MemTotal:       1048576 kB\nSwapFree:        524288 kB\n");
  EXPECT_EQ(memory_room_bytes(root_), 1536 * kMiB);
}

TEST_F(MemoryRoomTest, WhatIsCachedCanBeDropped) {
  put("proc/self/cgroup", "0::/\n");
  put("sys/fs/cgroup/memory.max", std::to_string(200 * kMiB));
  put("sys/fs/cgroup/memory.current", std::to_string(150 * kMiB));
  put("sys/fs/cgroup/memory.stat", "anon 1\ninactive_file " + std::to_string(60 * kMiB) + "\nactive_file " +
                                       std::to_string(40 * kMiB) + "\nslab_reclaimable " + std::to_string(10 * kMiB) +
                                       "\n");
  EXPECT_EQ(memory_room_bytes(root_), 160 * kMiB);
}

TEST_F(MemoryRoomTest, TheTightestGroupOnTheWayUpBinds) {
  put("proc/self/cgroup", "0::/pod/container\n");
  put("sys/fs/cgroup/pod/memory.max", std::to_string(100 * kMiB));
  put("sys/fs/cgroup/pod/memory.current", std::to_string(70 * kMiB));
  put("sys/fs/cgroup/pod/container/memory.max", std::to_string(60 * kMiB));
  put("sys/fs/cgroup/pod/container/memory.current", std::to_string(10 * kMiB));
  EXPECT_EQ(memory_room_bytes(root_), 30 * kMiB);
}

TEST_F(MemoryRoomTest, AContainerThatDoesNotSeeItsPathHasItsOwnFolder) {
  put("proc/self/cgroup", "5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n");
  put("sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(64 * kMiB) + "\n");
  put("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(80 * kMiB) + "\n");
  EXPECT_EQ(memory_room_bytes(root_), 0u) << "more is taken than may be";
}

TEST_F(MemoryRoomTest, NoBoundIsNone) {
  put("proc/self/cgroup", "5:memory:/\n0::/a\nnonsense\n");
  put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  put("sys/fs/cgroup/a/memory.max", "max\n");
  EXPECT_EQ(memory_room_bytes(root_), 1024 * kMiB);
}

}  // namespace
}  // namespace asyncfabric
