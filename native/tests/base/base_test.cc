// base_test.cc: the lock-free parts. Interleavings are chosen through seams; the stress runs at the end are for TSan.
#include <gtest/gtest.h>
#include <sys/select.h>

#include <atomic>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "base/mailbox.h"
#include "base/pin_table.h"
#include "base/slab.h"
#include "base/spsc_ring.h"
#include "base/wake_gate.h"

namespace asyncfabric {
namespace {

struct Item : MailLink {
  int value = 0;
};

// Runs a test's code between a producer's two writes.
struct StopBetween {
  static inline std::function<void()> at_seam;
  static void between_exchange_and_link() {
    if (at_seam) std::exchange(at_seam, nullptr)();
  }
};

TEST(MailboxTest, HalfPushedItemIsNotTakenButNotForgotten) {
  BasicMailbox<StopBetween> mailbox;
  Item first, second;
  first.value = 1;
  second.value = 2;
  mailbox.push(&first);
  bool looked = false;
  StopBetween::at_seam = [&] {
    // The consumer runs while `second` is exchanged in but not linked.
    EXPECT_FALSE(mailbox.empty()) << "a worker that slept now would lose the submission";
    MailLink* taken = mailbox.pop();
    if (taken != nullptr) { EXPECT_EQ(static_cast<Item*>(taken)->value, 1); }
    EXPECT_FALSE(mailbox.empty());
    looked = true;
  };
  mailbox.push(&second);
  ASSERT_TRUE(looked);
  std::vector<int> rest;
  while (MailLink* link = mailbox.pop()) rest.push_back(static_cast<Item*>(link)->value);
  ASSERT_FALSE(rest.empty());
  EXPECT_EQ(rest.back(), 2);
  EXPECT_TRUE(mailbox.empty());
}

TEST(MailboxTest, KeepsOrderOfEachProducerAndLosesNothing) {
  constexpr int kProducers = 3, kItems = 20'000;
  Mailbox mailbox;
  std::vector<std::vector<Item>> items(kProducers);
  for (auto& list : items) list = std::vector<Item>(kItems);
  std::vector<std::thread> producers;
  for (int p = 0; p < kProducers; ++p)
    producers.emplace_back([&, p] {
      for (int i = 0; i < kItems; ++i) {
        items[p][i].value = p * kItems + i;
        mailbox.push(&items[p][i]);
      }
    });
  std::vector<int> next(kProducers, 0);
  for (int taken = 0; taken < kProducers * kItems;) {
    MailLink* link = mailbox.pop();
    if (link == nullptr) continue;
    const int value = static_cast<Item*>(link)->value;
    ASSERT_EQ(value % kItems, next[value / kItems]++);
    ++taken;
  }
  for (std::thread& producer : producers) producer.join();
  EXPECT_TRUE(mailbox.empty());
}

TEST(SpscRingTest, FullIsRefusedAndNothingIsLost) {
  SpscRing<int> ring(16);
  int staged = 0;
  while (ring.stage(staged)) ++staged;
  EXPECT_EQ(staged, 16);
  int out[32];
  EXPECT_EQ(ring.take(out, 32), 0u) << "not published yet";
  ring.publish();
  EXPECT_EQ(ring.take(out, 5), 5u);
  EXPECT_EQ(out[4], 4);
  EXPECT_TRUE(ring.stage(16));
  ring.publish();
  EXPECT_EQ(ring.take(out, 32), 12u);
  EXPECT_EQ(out[11], 16);
  EXPECT_TRUE(ring.empty());
}

TEST(WakeGateTest, SleeperThatLooksAgainNeverMissesWork) {
  // Ping-pong where each side sleeps after every message: one lost wake-up hangs the test.
  SpscRing<int> there(16), back(16);
  WakeGate gate_there, gate_back;
  constexpr int kRounds = 20'000;
  const auto receive = [](SpscRing<int>& ring, WakeGate& gate) {
    int value;
    while (ring.take(&value, 1) == 0) {
      gate.prepare();
      if (ring.empty()) {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(gate.fd(), &set);
        timeval limit{10, 0};
        EXPECT_EQ(select(gate.fd() + 1, &set, nullptr, nullptr, &limit), 1) << "lost wake-up";
      }
      gate.finish();
    }
    return value;
  };
  std::thread echo([&] {
    for (int i = 0; i < kRounds; ++i) {
      back.stage(receive(there, gate_there));
      back.publish();
      gate_back.notify();
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    there.stage(i);
    there.publish();
    gate_there.notify();
    ASSERT_EQ(receive(back, gate_back), i);
  }
  echo.join();
}

struct Block {
  explicit Block(uint32_t slot_number) : slot(slot_number) {}
  const uint32_t slot;
  std::atomic<uint32_t> next_free{0};
  std::atomic<int> users{0};
};

TEST(SlabTest, NoSlotHasTwoUsers) {
  Slab<Block> slab(8);
  std::vector<std::thread> threads;
  std::atomic<bool> shared{false};
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20'000; ++i) {
        Block* block = slab.take();
        if (block == nullptr) continue;
        if (block->users.fetch_add(1) != 0) shared = true;
        block->users.fetch_sub(1);
        slab.give_back(block);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(shared);
  std::set<Block*> all;
  while (Block* block = slab.take()) all.insert(block);
  EXPECT_EQ(all.size(), 8u);
}

TEST(PinTableTest, StaleHandlesAreRefusedAndTheEndComesOnce) {
  PinTable<int> table;
  const uint64_t first = table.insert([](int& value) { value = 1; });
  auto* slot = table.pin(first);
  ASSERT_NE(slot, nullptr);
  bool closed = false;
  EXPECT_FALSE(table.close(first, &closed)) << "somebody holds a pin";
  EXPECT_TRUE(closed);
  EXPECT_EQ(table.pin(first), nullptr);
  EXPECT_TRUE(table.unpin(slot)) << "the last pin owns the end";
  table.erase(slot);
  const uint64_t second = table.insert([](int& value) { value = 2; });
  EXPECT_EQ(static_cast<uint32_t>(first), static_cast<uint32_t>(second)) << "the slot is used again";
  EXPECT_EQ(table.pin(first), nullptr) << "an old handle must not open the new object";
  EXPECT_FALSE(table.close(first, &closed));
  EXPECT_FALSE(closed);
  EXPECT_TRUE(table.close(second, &closed));
}

TEST(PinTableTest, PinsRaceWithCloseAndExactlyOneEndsIt) {
  for (int round = 0; round < 1000; ++round) {
    PinTable<int> table;
    const uint64_t handle = table.insert([](int& value) { value = 7; });
    std::atomic<int> ends{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t)
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i)
          if (auto* slot = table.pin(handle)) {
            EXPECT_EQ(slot->value, 7);
            if (table.unpin(slot)) ++ends;
          }
      });
    bool closed = false;
    if (table.close(handle, &closed)) ++ends;
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(ends, 1);
  }
}

}  // namespace
}  // namespace asyncfabric
