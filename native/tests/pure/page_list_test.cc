// page_list_test.cc: where the pages of ops lie: places of the room never overlap and are used again, the lowest first; what finds no place
// has memory of its own; numbers become offsets, and what their bounds are judged by is right.
#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <vector>

#include "engine/ops/page_list.h"

namespace asyncfabric::testing {
namespace {

constexpr uint64_t kRoomPages = PageRoom::kBytes / sizeof(Page);

bool in_room(const PageRoom& room, const PageList& list) {
  const auto* base = static_cast<const Page*>(room.base());
  return base != nullptr && &list[0] >= base && &list[0] < base + kRoomPages;
}

TEST(PageRoom, PlacesNeverOverlap) {
  PageRoom room;
  ASSERT_TRUE(room.open());
  std::mt19937 random(7);
  std::deque<std::pair<Page*, uint64_t>> held;
  uint64_t refused = 0;
  for (uint64_t turn = 1; turn < 20'000; ++turn) {
    if (held.size() > 40 || (!held.empty() && random() % 3 == 0)) {
      std::swap(held[random() % held.size()], held.back());
      const auto [pages, count] = held.back();
      EXPECT_EQ(pages[0].source, pages[count - 1].target) << "somebody else wrote there";
      room.give_back(pages, count);
      held.pop_back();
    }
    const uint64_t count = random() % 2 == 0 ? 1 + random() % 30'000 : PageRoom::kUnit * (1 + random() % 100);
    Page* const pages = room.take(count);
    if (pages == nullptr) {
      ++refused;
      continue;
    }
    pages[0].source = pages[count - 1].target = turn;
    held.emplace_back(pages, count);
  }
  EXPECT_GT(refused, 0u);
  EXPECT_LT(refused, 19'000u);
  for (const auto& [pages, count] : held) room.give_back(pages, count);
  Page* const all = room.take(kRoomPages);
  ASSERT_NE(all, nullptr) << "all was given back";
  EXPECT_EQ(room.take(1), nullptr);
  room.give_back(all, kRoomPages);
  EXPECT_EQ(room.take(1), all) << "the lowest place first";
  EXPECT_EQ(room.take(kRoomPages + 1), nullptr);
}

TEST(PageList, LiesInTheRoomAsLongAsThereIsPlace) {
  PageRoom room;
  ASSERT_TRUE(room.open());
  PageList first, second, third;
  first.make(kRoomPages, room);
  EXPECT_TRUE(in_room(room, first));
  second.make(100, room);
  EXPECT_FALSE(in_room(room, second));
  first.clear();
  EXPECT_EQ(first.size(), 0u);
  third.make(100, room);
  EXPECT_TRUE(in_room(room, third));
  const Page* const own = &second[0];
  second.clear();
  third.clear();
  first.make(kRoomPages, room);
  second.make(100, room);
  EXPECT_EQ(&second[0], own) << "small memory of its own is kept";
}

TEST(PageList, WithoutARoomHasMemoryOfItsOwn) {
  PageRoom room;
  PageList list;
  for (const uint64_t count : {1, 70'000, 3}) {
    list.make(count, room);
    const std::vector<int64_t> numbers(count, 5);
    EXPECT_TRUE(list.fill(numbers.data(), numbers.data(), {1, 2}, {10, 20}, {5, 5}, false));
    EXPECT_EQ(list[count - 1].source, 51u);
    EXPECT_EQ(list[count - 1].target, 102u);
    list.clear();
  }
}

TEST(PageList, ReportsWhatItsOffsetsAreMultiplesOfAndTheLargest) {
  PageRoom room;
  PageList list;
  const std::vector<int64_t> sources{3, 0, 7}, targets{2, 9, 1};
  list.make(3, room);
  EXPECT_TRUE(list.fill(sources.data(), targets.data(), {64, 128}, {32, 16}, {7, 9}, false));
  EXPECT_EQ(list.most(), 128u + 9 * 16) << "of a write: the targets are behind the key";
  EXPECT_EQ(list.bits() & 15, 0u);
  EXPECT_NE(list.bits() & 16, 0u);
  EXPECT_TRUE(list.fill(sources.data(), targets.data(), {64, 129}, {32, 16}, {7, 9}, false));
  EXPECT_NE(list.bits() & 15, 0u);
  EXPECT_TRUE(list.fill(sources.data(), targets.data(), {64, 128}, {32, 16}, {7, 9}, true));
  EXPECT_EQ(list.most(), 64u + 7 * 32) << "of a read: the sources are";
}

TEST(PageList, RefusesWhatLeavesABound) {
  PageRoom room;
  PageList list;
  list.make(3, room);
  const std::vector<int64_t> fine{1, 2, 3}, far{1, 4, 3}, negative{1, -1, 3};
  const Page none{0, 0}, one{1, 1}, bound{3, 3};
  EXPECT_TRUE(list.fill(fine.data(), fine.data(), none, one, bound, false));
  for (const auto& wrong : {far, negative}) {
    EXPECT_FALSE(list.fill(wrong.data(), fine.data(), none, one, bound, false));
    EXPECT_FALSE(list.fill(fine.data(), wrong.data(), none, one, bound, false));
  }
}

}  // namespace
}  // namespace asyncfabric::testing
