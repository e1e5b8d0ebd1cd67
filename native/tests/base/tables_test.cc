// tables_test.cc: striping, counters and the bytes on the wire: the engine's pure parts.
#include <gtest/gtest.h>
#include <time.h>

#include <random>
#include <thread>

#include "asyncfabric/engine.h"
#include "base/pin_table.h"
#include "engine/counters/counters.h"
#include "engine/ops/op.h"
#include "engine/ops/striping.h"
#include "engine/wire.h"

namespace asyncfabric {
namespace {

TEST(StripingTest, CoversEveryUnitOnceWhateverTheWeights) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 20'000; ++round) {
    const size_t lanes = 1 + random() % 8;
    std::vector<double> weights(lanes);
    for (double& weight : weights) weight = random() % 5 == 0 ? 100.0 : 1.0 + static_cast<double>(random() % 400);
    const uint64_t total = random() % 7 == 0 ? random() % 5 : random() % (1ull << (random() % 40));
    const uint64_t minimum = random() % 70'000, align = round % 2 == 0 ? 1 : 4096;
    std::vector<Stripe> parts(lanes);
    const size_t count = plan_stripes(total, weights, random() % lanes, minimum, align, parts);
    uint64_t at = 0;
    uint64_t used = 0;
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(parts[i].begin, at);
      ASSERT_GT(parts[i].end, parts[i].begin) << "an empty shard would carry a surplus immediate";
      ASSERT_LT(parts[i].lane, lanes);
      ASSERT_EQ(used >> parts[i].lane & 1, 0u) << "one part per lane";
      used |= 1ull << parts[i].lane;
      at = parts[i].end;
    }
    ASSERT_EQ(at, total);
    ASSERT_EQ(count == 0, total == 0);
  }
}

TEST(StripingTest, RemaindersAndSpeeds) {
  std::vector<Stripe> parts(3);
  const double equal[] = {1, 1};
  ASSERT_EQ(plan_stripes(16385, equal, 0, 8192, 4096, parts), 2u);
  EXPECT_EQ(parts[1].end, 16385u) << "the byte behind the shard size";
  const double unequal[] = {400, 200, 100};
  ASSERT_EQ(plan_stripes(7'000'000, unequal, 0, 1, 1, parts), 3u);
  EXPECT_NEAR(static_cast<double>(parts[0].end - parts[0].begin), 4e6, 10);
  EXPECT_NEAR(static_cast<double>(parts[2].end - parts[2].begin), 1e6, 10);
}

// As the engine does when all peers have confirmed; returns how many were closed.
size_t confirm_all(CounterTable& table) {
  std::vector<uint32_t> closed;
  table.take_closed([&](uint32_t imm, uint32_t) { closed.push_back(imm); });
  for (const uint32_t imm : closed) table.confirm_closed(imm);
  return closed.size();
}

TEST(CountersTest, ImmediateRoundTrip) {
  for (const uint32_t imm : {0u, 1u, 77u, kMaxImm})
    for (const uint32_t worth : {1u, 2u, 1023u, 1024u})
      for (uint32_t generation = 0; generation < 4; ++generation) {
        const uint32_t packed = pack_imm(imm, generation, worth);
        EXPECT_EQ(imm_of(packed), imm);
        EXPECT_EQ(worth_of(packed), worth);
        EXPECT_EQ(generation_of(packed), generation);
      }
}

TEST(CountersTest, GenerationsKeepLateArrivalsFromTheNextUser) {
  CounterTable table;
  CounterId id;
  uint32_t imm;
  EXPECT_TRUE(table.arrive(pack_imm(9, 0, 3)).early);
  ASSERT_TRUE(table.open(9, &id, &imm).ok());
  EXPECT_EQ(table.value(id), 3u) << "count first, arm later";
  EXPECT_EQ(table.open(9, &id, &imm).code, StatusCode::kBusy);
  table.close(id);
  EXPECT_EQ(table.value(id), 0u);
  EXPECT_TRUE(table.arrive(pack_imm(9, 0, 1)).stale);
  CounterId second;
  EXPECT_EQ(table.open(9, &second, &imm).code, StatusCode::kUnconfirmed);
  EXPECT_EQ(confirm_all(table), 1u);
  EXPECT_TRUE(table.arrive(pack_imm(9, 1, 1)).stale) << "nobody has opened it again";
  ASSERT_TRUE(table.open(9, &second, &imm).ok());
  EXPECT_EQ(table.generation(9), 1u);
  EXPECT_TRUE(table.arrive(pack_imm(9, 0, 1)).stale) << "posted for the first user";
  EXPECT_EQ(table.value(second), 0u);
  EXPECT_FALSE(table.arrive(pack_imm(9, 1, 2)).stale);
  EXPECT_EQ(table.value(second), 2u);
}

TEST(CountersTest, PickedImmsComeBackLate) {
  CounterTable table;
  uint32_t first = 0, imm = 0;
  for (int i = 0; i < 1000; ++i) {
    CounterId id;
    ASSERT_TRUE(table.open(kNoImm, &id, &imm).ok());
    if (i == 0) first = imm;
    ASSERT_TRUE(i == 0 || imm != first);
    table.close(id);
  }
}

// A counter for each request, for hours: each imm is opened again and again, its generation goes round, and each count is its own.
TEST(CountersTest, MillionsOfCountersCostNoMoreThanTheFirstOnes) {
  CounterTable table;
  constexpr uint32_t kRound = (kMaxImm + 1) / 2, kRounds = 6;
  const auto cpu_ns = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
  };
  std::vector<uint64_t> took;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const uint64_t begun = cpu_ns();
    for (uint32_t i = 0; i < kRound; ++i) {
      CounterId id = 0;
      uint32_t imm = 0;
      ASSERT_TRUE(table.open(kNoImm, &id, &imm).ok());
      ASSERT_EQ(table.generation(imm), round & 3);
      ASSERT_TRUE(table.arrive(pack_imm(imm, round + 3, 7)).stale) << "meant for the one before";
      ASSERT_FALSE(table.arrive(pack_imm(imm, round, 2)).stale);
      ASSERT_EQ(table.value(id), 2u);
      table.close(id);
      if (i % 1024 == 1023) confirm_all(table);
    }
    took.push_back(cpu_ns() - begun);
  }
  EXPECT_LT(took.back(), 5 * took[1]);
}

// An arrival that is being counted while its counter closes has the counter's flag in its hands, and may raise it once more.
TEST(CountersTest, AFlagIsHandedOnWhenNoArrivalCanRaiseItAnyMore) {
  CounterTable table;
  SharedWords words;
  CounterId id = 0;
  uint32_t imm = 0;
  ASSERT_TRUE(table.open(1, &id, &imm).ok());
  uint64_t* flag = table.flag(id, words);
  ASSERT_NE(flag, nullptr);
  for (uint32_t i = 1; i < SharedWords::kFlagWords; ++i) ASSERT_NE(words.take_flag(), nullptr);
  table.close(id);
  EXPECT_EQ(*flag, SharedWords::kReleased) << "who waits for it goes on at once";
  CounterId next = 0;
  ASSERT_TRUE(table.open(2, &next, &imm).ok());
  EXPECT_EQ(table.flag(next, words), nullptr) << "an arrival of the first counter may still be under way";
  table.take_closed([](uint32_t, uint32_t) {});  // between two arrivals
  EXPECT_EQ(table.flag(next, words), flag);
  EXPECT_EQ(*flag, 0u);
}

TEST(CountersTest, APickedImmIsOneWhoseCloseIsConfirmed) {
  CounterTable table;
  std::vector<CounterId> ids((kMaxImm + 1) / 2);
  uint32_t imm = 0;
  for (CounterId& id : ids) ASSERT_TRUE(table.open(kNoImm, &id, &imm).ok());
  CounterId id = 0;
  EXPECT_EQ(table.open(kNoImm, &id, &imm).code, StatusCode::kBusy);
  table.close(ids[7]);
  EXPECT_EQ(table.open(kNoImm, &id, &imm).code, StatusCode::kUnconfirmed);
  table.close(ids[9]);
  table.confirm_closed(static_cast<uint32_t>(ids[9]) - 1);
  ASSERT_TRUE(table.open(kNoImm, &id, &imm).ok());
  EXPECT_EQ(imm, static_cast<uint32_t>(ids[9]) - 1);
}

// Both hold a pin, as two releases of a region at once do: only the one that closed it answers for the end.
TEST(PinTableTest, OfTwoThatCloseAtOnceOneDid) {
  PinTable<int> table;
  const uint64_t handle = table.insert([](int&) {});
  PinTable<int>::Slot* const one = table.pin(handle);
  PinTable<int>::Slot* const other = table.pin(handle);
  ASSERT_NE(other, nullptr);
  bool closed = false;
  EXPECT_FALSE(table.close(handle, &closed));
  EXPECT_TRUE(closed);
  EXPECT_FALSE(table.close(handle, &closed));
  EXPECT_FALSE(closed);
  EXPECT_FALSE(table.unpin(one));
  EXPECT_TRUE(table.unpin(other)) << "the last pin owns the end";
  table.erase(other);
}

// A thread that was held up between its look at an op and its word for the worker.
TEST(OpTest, ALateCancelDoesNotTakeThePlaceOfOneForALaterUseOfTheSlot) {
  Op op(0);
  op.mean_to_cancel(7);
  op.mean_to_cancel(6);
  EXPECT_EQ(op.cancel_generation.load(), 7u);
  op.mean_to_cancel(0xfffffff0);
  EXPECT_EQ(op.cancel_generation.load(), 7u) << "generations go round";
  op.mean_to_cancel(8);
  EXPECT_EQ(op.cancel_generation.load(), 8u);
}

TEST(CountersTest, ArmingRacesWithArrivalsAndIsNeverLost) {
  CounterTable table;
  CounterId id;
  uint32_t imm;
  ASSERT_TRUE(table.open(3, &id, &imm).ok());
  constexpr uint64_t kRounds = 20'000;
  std::atomic<uint64_t> reached{0};
  std::thread engine([&] {
    for (uint64_t i = 0; i < kRounds; ++i) {
      if (table.arrive(pack_imm(3, 0, 1)).reached) reached.fetch_add(1);
      while (reached.load() <= i) {  // wait until the armer had its turn; its own check may be what completes it
        if (table.check_armed(3).reached) reached.fetch_add(1);
      }
    }
  });
  for (uint64_t i = 0; i < kRounds; ++i) {
    table.arm(id, i, i + 1);
    while (reached.load() <= i) {}
  }
  engine.join();
  EXPECT_EQ(table.value(id), kRounds);
}

AddressBlob sample_address() {
  AddressBlob blob;
  blob.incarnation = 0x1234567890abcdef;
  blob.host = 42;
  blob.rails = {{"local", "abc"}, {"tcp", std::string(100, 'x')}};
  return blob;
}

TEST(WireTest, RoundTripsAndRefusesDamage) {
  const std::string address = encode_address(sample_address());
  AddressBlob back;
  ASSERT_TRUE(decode_address(address, &back));
  EXPECT_EQ(back.rails[1].address.size(), 100u);
  KeyBlob key;
  key.incarnation = sample_address().incarnation;
  key.region = 7;
  key.length = 1ull << 33;
  key.access = 3;
  key.rail_keys = {"k1", std::string(128, 'k')};
  key.address = address;
  const std::string bytes = encode_key(key);
  KeyBlob key_back;
  ASSERT_TRUE(decode_key(bytes, &key_back));
  EXPECT_EQ(key_back.length, 1ull << 33);
  std::mt19937 random(5);
  for (size_t length = 0; length < bytes.size(); ++length) EXPECT_FALSE(decode_key(bytes.substr(0, length), &key_back));
  for (int i = 0; i < 20'000; ++i) {
    std::string damaged = bytes;
    damaged[random() % damaged.size()] ^= static_cast<char>(1 + random() % 255);
    EXPECT_FALSE(decode_key(damaged, &key_back));
    std::string noise(random() % 300, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    EXPECT_FALSE(decode_address(noise, &back));
    EXPECT_FALSE(decode_key(noise, &key_back));
  }
}

// A forger can make the checksum right: every length inside must still be bounded.
TEST(WireTest, ForgedLengthsAreBounded) {
  std::mt19937 random(6);
  const std::string address = encode_address(sample_address());
  for (int i = 0; i < 50'000; ++i) {
    std::string forged = address.substr(0, address.size() - 8);
    for (int flips = 1 + static_cast<int>(random() % 4); flips > 0; --flips)
      forged[random() % forged.size()] = static_cast<char>(random());
    if (random() % 3 == 0) forged.resize(random() % forged.size());
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const char c : forged) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    forged.append(reinterpret_cast<const char*>(&hash), 8);
    AddressBlob back;
    if (decode_address(forged, &back)) { EXPECT_LE(back.rails.size(), 32u); }
  }
}

}  // namespace
}  // namespace asyncfabric
