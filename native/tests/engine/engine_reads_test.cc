// engine_reads_test.cc: reads whose bytes come after post() has returned. INV-2 holds for their destination: once a read has ended, however
// it ended, nothing arrives there any more. Engines are driven by hand.
#include <algorithm>

#include "rigs/engine_pair.h"

namespace asyncfabric {
namespace {

using testing::Pair;

constexpr uint64_t kLength = 4 << 20;  // several requests, more than one pass posts
constexpr uint8_t kOurs = 0xee;

class BouncedReads : public ::testing::TestWithParam<bool> {
 public:
  BouncedReads() : pair(Pair::manual(bouncing())) {
    here = pair.add_region(*pair.a, destination);
    const RegionId there = pair.add_region(*pair.b, source);
    key = pair.give_key(*pair.b, there, kLength, *pair.a, kAccessRemoteRead);
    pair.connect(*pair.a, *pair.b);
    const uint64_t cookie = read(0, kPage);  // the key is attached
    EXPECT_TRUE(pair.wait(*pair.a, cookie).status.ok());
  }

  static RailSpec bouncing() {
    RailSpec rail;
    rail.provider = "local";
    rail.options = {{"foreign", "bounce"}};
    return rail;
  }

  uint64_t read(uint64_t offset, uint64_t length) {
    const uint64_t cookie = pair.a->cookie();
    Status status;
    if (!GetParam()) {
      status = pair.a->engine->submit_read(cookie, here, offset, length, key, offset, &op);
    } else {
      std::vector<int64_t> pages;
      for (uint64_t page = 0; page < length / kPage; ++page) pages.push_back(static_cast<int64_t>(page));
      std::vector<int64_t> turned(pages.rbegin(), pages.rend());
      const PageBatch batch{pages.data(), turned.data(), pages.size(), kPage, kPage, kPage, offset, offset};
      status = pair.a->engine->submit_read_pages(cookie, here, key, batch, &op);
    }
    EXPECT_TRUE(status.ok());
    return cookie;
  }

  static constexpr uint64_t kPage = 64 << 10;
  std::vector<uint8_t> source = std::vector<uint8_t>(kLength, 0x11), destination = std::vector<uint8_t>(kLength);
  Pair pair;
  RegionId here = 0;
  KeyId key = 0;
  OpId op = 0;
};

// The owner stands still while the reader posts, cancels and waits. What the owner then hands over has to find the read not ended.
TEST_P(BouncedReads, NothingArrivesAfterACancelledReadHasEnded) {
  const uint64_t cookie = read(0, kLength);
  pair.a->engine->step();
  ASSERT_GT(pair.a->engine->progress(op).bytes_posted, 0u);
  ASSERT_LT(pair.a->engine->progress(op).bytes_posted, kLength);
  ASSERT_TRUE(pair.a->engine->cancel(op).ok());
  for (int i = 0; i < 20; ++i) {
    pair.a->engine->step();
    pair.a->take();
  }
  if (!pair.a->done.contains(cookie)) {
    const Completion done = pair.wait(*pair.a, cookie);
    EXPECT_EQ(done.status.code, StatusCode::kCancelled);
  }
  std::fill(destination.begin(), destination.end(), kOurs);  // the memory is the caller's again
  for (int i = 0; i < 50; ++i) pair.turn();
  EXPECT_EQ(std::count(destination.begin(), destination.end(), kOurs), static_cast<ptrdiff_t>(kLength));
}

INSTANTIATE_TEST_SUITE_P(Kinds, BouncedReads, ::testing::Bool(),
                         [](const auto& pages) { return pages.param ? "Pages" : "Range"; });

}  // namespace
}  // namespace asyncfabric
