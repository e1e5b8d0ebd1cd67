// local_wake_test.cc: sleeping and being rung: chosen interleavings of prepare_wait, and two sleepers that must never
// miss each other.
#include <array>
#include <thread>

#include "local_rig.h"

namespace asyncfabric {
namespace {

using namespace local_rig;

TEST(LocalWake, NoticeAfterPreparingRingsTheDoorbell) {
  Endpoint sender;
  Endpoint receiver;
  auto peer = sender.connect(receiver);
  ASSERT_TRUE(receiver.rail->prepare_wait());
  EXPECT_FALSE(readable(receiver));
  sender.post({signal(*peer, 1, 1)});
  EXPECT_TRUE(readable(receiver));
  receiver.rail->cancel_wait();
  EXPECT_FALSE(readable(receiver)) << "a level-triggered sleeper would spin";
  EXPECT_TRUE(eventually({&receiver}, [&] { return receiver.imms.size() == 1; }));

  sender.post({signal(*peer, 2, 2)});
  EXPECT_FALSE(receiver.rail->prepare_wait()) << "the notice is there already";
  EXPECT_TRUE(eventually({&receiver}, [&] { return receiver.imms.size() == 2; }));
  EXPECT_FALSE(readable(receiver)) << "an awake receiver costs no system call";
}

TEST(LocalWake, OwnCompletionsForbidSleep) {
  Endpoint sender;
  Endpoint receiver;
  auto peer = sender.connect(receiver);
  sender.post({signal(*peer, 1, 1)});
  EXPECT_FALSE(sender.rail->prepare_wait()) << "a completion waits to be polled";
  while (sender.poll() > 0) {}
  EXPECT_TRUE(sender.rail->prepare_wait());
  sender.rail->cancel_wait();
}

TEST(LocalWake, BouncedCompletionRingsTheSleepingSender) {
  Endpoint sender(Words{{"foreign", "bounce"}});
  Endpoint receiver;
  Block source(4096);
  Block target(4096);
  auto peer = sender.connect(receiver);
  auto remote = attach(sender, *peer, target.enrol(receiver));
  sender.post({transfer(WorkKind::kWrite, *peer, *remote, source.data(), 0, 4096, 1)});
  EXPECT_EQ(sender.poll(), 0u);
  ASSERT_TRUE(sender.rail->prepare_wait());
  ASSERT_TRUE(eventually({&receiver}, [&] { return readable(sender); }));
  sender.rail->cancel_wait();
  sender.poll();
  EXPECT_TRUE(sender.done.at(1).ok());
}

TEST(LocalWake, LossRingsTheSleeper) {
  Endpoint sender;
  auto receiver = std::make_unique<Endpoint>();
  auto peer = sender.connect(*receiver);
  ASSERT_TRUE(sender.rail->prepare_wait());
  receiver.reset();
  pollfd bed{sender.rail->wait_fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&bed, 1, 5000), 1);
  sender.rail->cancel_wait();
  EXPECT_TRUE(eventually({&sender}, [&] { return sender.lost.size() == 1; }));
  EXPECT_EQ(sender.lost[0], peer.get());
}

// Both sleep whenever they are idle: one lost wake-up stops the exchange.
TEST(LocalWake, TwoSleepersNeverMissEachOther) {
  constexpr uint32_t kRounds = 4000;
  Endpoint first;
  Endpoint second;
  auto to_second = first.connect(second);
  auto to_first = second.connect(first);
  std::atomic<bool> stuck{false};
  const auto serve = [&](Endpoint& endpoint, RailPeer& peer, bool starts) {
    const auto shout = [&](uint32_t value) {
      auto request = signal(peer, value, 0);
      request.signalled = false;
      endpoint.post({request});
    };
    if (starts) shout(0);
    size_t seen = 0;
    while (seen < kRounds && !stuck) {
      endpoint.poll();
      for (; seen < endpoint.imms.size(); ++seen)
        if (!starts || seen + 1 < kRounds) shout(endpoint.imms[seen] + 1);
      if (seen < kRounds && endpoint.rail->prepare_wait()) {
        pollfd bed{endpoint.rail->wait_fd(), POLLIN, 0};
        if (::poll(&bed, 1, 5000) == 0) stuck = true;
        endpoint.rail->cancel_wait();
      }
    }
  };
  std::thread other([&] { serve(second, *to_first, false); });
  serve(first, *to_second, true);
  other.join();
  EXPECT_FALSE(stuck) << "a sleeper was not woken";
  EXPECT_EQ(first.imms.size(), kRounds);
}

// Many senders, a receiver that sleeps between bursts: the bits of the bell must survive promotion and cooling.
TEST(LocalWake, ManySendersAndOneSleeper) {
  constexpr size_t kSenders = 24;
  constexpr uint32_t kEach = 400;
  Endpoint hub;
  std::array<std::unique_ptr<Endpoint>, 2> crowds = {std::make_unique<Endpoint>(), std::make_unique<Endpoint>()};
  std::vector<std::unique_ptr<RailPeer>> peers;
  for (size_t i = 0; i < kSenders; ++i) peers.push_back(crowds[i % 2]->connect(hub));
  std::vector<std::thread> threads;
  for (size_t half = 0; half < 2; ++half)
    threads.emplace_back([&, half] {
      std::mt19937_64 random(half);
      for (uint32_t i = 0; i < kEach * kSenders / 2; ++i) {
        auto request = signal(*peers[random() % (kSenders / 2) * 2 + half], i, 0);
        request.signalled = false;
        crowds[half]->post({request});
      }
    });
  size_t naps = 0;
  bool stuck = false;
  while (hub.imms.size() < kEach * kSenders && !stuck) {
    if (hub.poll() > 0 || !hub.rail->prepare_wait()) continue;
    pollfd bed{hub.rail->wait_fd(), POLLIN, 0};
    stuck = ::poll(&bed, 1, 5000) == 0;
    hub.rail->cancel_wait();
    ++naps;
  }
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(stuck) << "asleep with " << hub.imms.size() << " of " << kEach * kSenders << " notices taken";
}

}  // namespace
}  // namespace asyncfabric
