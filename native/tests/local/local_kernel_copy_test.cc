// local_kernel_copy_test.cc: runs of pieces that the kernel copies, in one call or in several at once, with this process as the other one.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "providers/local/transfers/kernel_copy.h"

namespace asyncfabric::local {
namespace {

constexpr size_t kRunBytes = 4 << 20;

class LocalKernelCopy : public ::testing::TestWithParam<uint32_t> {
 protected:
  LocalKernelCopy()
      : copier_(CopyMode::kAuto), pool_(copier_, GetParam()), copy_(pool_), here_(kRunBytes), there_(kRunBytes) {
    std::mt19937_64 random(7);
    std::generate(here_.begin(), here_.end(), [&] { return static_cast<uint8_t>(random()); });
  }

  const Copier copier_;
  CopyPool pool_;
  KernelCopy copy_;
  std::vector<uint8_t> here_;
  std::vector<uint8_t> there_;
};

TEST_P(LocalKernelCopy, MovesExactlyItsPiecesBothWays) {
  std::mt19937_64 random(3);
  for (const size_t page : {4096ul, 65536ul, 1ul << 20, 999ul * 31}) {
    std::vector<size_t> sources(kRunBytes / page), targets(kRunBytes / page);
    std::iota(sources.begin(), sources.end(), 0);
    std::iota(targets.begin(), targets.end(), 0);
    std::shuffle(sources.begin(), sources.end(), random);
    std::shuffle(targets.begin(), targets.end(), random);
    for (const bool writes : {true, false}) {
      std::vector<uint8_t> expected(kRunBytes, 0xa5);
      std::fill(there_.begin(), there_.end(), uint8_t{0xa5});
      copy_.clear();
      size_t pieces = 0;
      for (; pieces + 1 < sources.size() && copy_.has_room(page); ++pieces) {
        uint8_t* from = here_.data() + sources[pieces] * page;
        uint8_t* to = there_.data() + targets[pieces] * page;
        copy_.add(writes ? from : to, writes ? to : from, page);
        std::memcpy(expected.data() + targets[pieces] * page, from, page);
      }
      ASSERT_EQ(copy_.run(getpid(), writes), static_cast<ssize_t>(pieces * page)) << page;
      ASSERT_EQ(there_, expected) << page << (writes ? " written" : " read");
    }
  }
}

TEST_P(LocalKernelCopy, PiecesThatFollowEachOtherAreCutWhereTheyAreLong) {
  copy_.clear();
  for (size_t at = 0; at < kRunBytes; at += kRunBytes / 8) {
    ASSERT_TRUE(copy_.has_room(kRunBytes / 8));
    copy_.add(here_.data() + at, there_.data() + at, kRunBytes / 8);
  }
  ASSERT_EQ(copy_.run(getpid(), true), static_cast<ssize_t>(kRunBytes));
  EXPECT_EQ(there_, here_);
}

TEST_P(LocalKernelCopy, CountsTheBytesInFrontOfTheFirstThatCannotBeCopied) {
  auto* place =
      static_cast<uint8_t*>(mmap(nullptr, kRunBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(place, MAP_FAILED);
  constexpr size_t kPage = 4096;
  for (const size_t hole : {0ul, 1ul, 100ul, 500ul, 511ul}) {
    std::memset(place, 0, kRunBytes);
    ASSERT_EQ(mprotect(place + hole * kPage * 2, kPage, PROT_NONE), 0);
    copy_.clear();
    for (size_t page = 0; page < 512; ++page)  // every other one, so that none follows another
      copy_.add(here_.data() + page * kPage * 2, place + page * kPage * 2, kPage);
    errno = 0;
    const ssize_t moved = copy_.run(getpid(), true);
    if (hole == 0) {
      EXPECT_EQ(moved, -1);
      EXPECT_EQ(errno, EFAULT);
    } else {
      EXPECT_EQ(moved, static_cast<ssize_t>(hole * kPage));
    }
    for (size_t page = 0; page < hole; ++page)
      ASSERT_EQ(std::memcmp(place + page * kPage * 2, here_.data() + page * kPage * 2, kPage), 0) << page;
    ASSERT_EQ(mprotect(place + hole * kPage * 2, kPage, PROT_READ | PROT_WRITE), 0);
  }
  EXPECT_EQ(munmap(place, kRunBytes), 0);
}

TEST_P(LocalKernelCopy, PiecesThatOverlapAreNotTornApart) {
  constexpr size_t kPage = 65536;
  for (int round = 0; round < 100; ++round) {
    copy_.clear();
    for (size_t page = 0; page < 32; ++page)  // all to the same two places, which overlap
      copy_.add(here_.data() + page * kPage, there_.data() + (page % 2) * kPage / 2, kPage);
    ASSERT_EQ(copy_.run(getpid(), true), static_cast<ssize_t>(32 * kPage));
    ASSERT_EQ(std::memcmp(there_.data() + kPage / 2, here_.data() + 31 * kPage, kPage), 0) << "the last one stays";
    ASSERT_EQ(std::memcmp(there_.data(), here_.data() + 30 * kPage, kPage / 2), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Helpers, LocalKernelCopy, ::testing::Values(0u, 1u, 3u));

}  // namespace
}  // namespace asyncfabric::local
