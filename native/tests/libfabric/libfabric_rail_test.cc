// libfabric_rail_test.cc: the provider contract on the profiles of libfabric, two rails in one process, post and poll driven by hand.
#include "libfabric_pair.h"

#include <linux/tcp.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "providers/libfabric/peers/inbound.h"

namespace asyncfabric::testing {
namespace {

class LibfabricRail : public ::testing::TestWithParam<const char*> {
 protected:
  RailSpec spec() const { return spec_of(GetParam()); }
  void SetUp() override {
    if (const std::string reason = missing(spec()); !reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_P(LibfabricRail, StatesWhatWasOpened) {
  Side side(spec());
  const RailInfo info = side.rail->info();
  EXPECT_EQ(info.provider, spec().provider);
  EXPECT_NE(info.library.find("libfabric"), std::string::npos);
  EXPECT_EQ(info.library.front(), '/');
  EXPECT_NE(info.version.find("1."), std::string::npos);
  EXPECT_TRUE(info.ordered);
  EXPECT_FALSE(info.device.empty());
  EXPECT_LE(side.rail->address().size(), 512u);
  EXPECT_LE(side.key.size(), 128u);
  EXPECT_GE(side.rail->capabilities().max_send_bytes, kMaxMessageBytes + 1024);
  EXPECT_LE(side.rail->capabilities().max_request_bytes, 1ull << 30);
}

TEST_P(LibfabricRail, WritesOddSizesAtOddOffsetsAndNothingElse) {
  constexpr size_t kRegion = 9 << 20;
  Side a(spec(), kRegion), b(spec(), kRegion);
  Link link(a, b);
  uint64_t seed = 1;
  for (const uint64_t length : {1ull, 2ull, 63ull, 64ull, 65ull, 255ull, 4095ull, 4096ull, 4097ull, 8191ull, 8192ull,
                                8193ull, 65535ull, 65537ull, (1ull << 20) - 1, (1ull << 20) + 1, (8ull << 20) + 3}) {
    for (const uint64_t offset : {0ull, 1ull, 4093ull}) {
      fill(a.region, ++seed);
      std::fill(b.region.begin(), b.region.end(), 0xee);
      const uint64_t to = offset * 3 + 7;
      const size_t came = b.imms.size();
      link.post(link.write_imm(offset, to, length, seed, 5), {&a, &b});
      ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == seed - 1 && b.imms.size() == came + 1; }))
          << length;
      EXPECT_TRUE(a.done.back().second.ok());
      EXPECT_EQ(a.done.back().first, seed);
      EXPECT_EQ(std::memcmp(b.region.data() + to, a.region.data() + offset, length), 0) << length << " at " << offset;
      EXPECT_TRUE(rail_rig::untouched(b.region, 0, to));
      EXPECT_TRUE(rail_rig::untouched(b.region, to + length, b.region.size()));
    }
  }
}

// INV-1 on an ordered rail: when the immediate of the last request is there, the bytes of all earlier ones are.
TEST_P(LibfabricRail, ImmediateComesAfterAllEarlierData) {
  constexpr uint32_t kRounds = 300, kPages = 16;
  constexpr uint64_t kPage = 6000;  // above and below the eager sizes of the providers, with the short one below
  Side a(spec()), b(spec());
  Link link(a, b);
  uint32_t wrong = 0;
  b.on_imm = [&](uint32_t round) {
    for (uint32_t page = 0; page < kPages; ++page)
      for (const uint64_t at : {uint64_t{0}, uint64_t{63}})
        wrong += b.region[page * kPage + at] != static_cast<uint8_t>(round + page);
  };
  for (uint32_t round = 1; round <= kRounds; ++round) {
    for (uint32_t page = 0; page < kPages; ++page) {
      std::memset(a.region.data() + page * kPage, static_cast<int>(round + page) & 0xff, kPage);
      WorkRequest request = link.write(page * kPage, page * kPage, page % 3 == 0 ? 64 : kPage, round);
      request.signalled = false;
      if (page + 1 == kPages) request = link.write_imm(page * kPage, page * kPage, 64, round, round);
      link.post(request, {&a, &b});
    }
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == round && a.done.size() == round; })) << round;
    EXPECT_EQ(b.imms.back(), round);
  }
  EXPECT_EQ(wrong, 0u);
}

TEST_P(LibfabricRail, QuietRequestsAreSilentAndASignalledOneComesLast) {
  Side a(spec()), b(spec());
  Link link(a, b);
  for (uint64_t i = 0; i < 100; ++i) {
    WorkRequest request = link.write(i * 64, i * 64, i % 2 == 0 ? 64 : 5000, 1000 + i);
    request.signalled = false;
    link.post(request, {&a, &b});
  }
  WorkRequest read = link.write(0, 0, 64, 7);  // a read takes a round trip, the write behind it does not
  if (a.rail->capabilities().read) read.kind = WorkKind::kRead;
  link.post(read, {&a, &b});
  link.post(link.write(0, 0, 64, 42), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 2; }));
  EXPECT_EQ(a.done[0].first, 7u);
  EXPECT_EQ(a.done[1].first, 42u);
  EXPECT_TRUE(a.done[1].second.ok());
}

TEST_P(LibfabricRail, DeliveredCompletionMeansVisible) {
  Side a(spec()), b(spec());
  Link link(a, b);
  fill(a.region, 3);
  for (const uint64_t length : {uint64_t{1}, uint64_t{64}, uint64_t{4096}, uint64_t{100000}}) {
    std::fill(b.region.begin(), b.region.end(), 0);
    WorkRequest request = link.write(0, 0, length, length);
    request.delivered = true;
    link.post(request, {&a, &b});
    const size_t done = a.done.size();
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == done + 1; }));
    EXPECT_TRUE(a.done.back().second.ok());
    EXPECT_EQ(std::memcmp(a.region.data(), b.region.data(), length), 0);
  }
}

TEST_P(LibfabricRail, Reads) {
  Side a(spec()), b(spec());
  if (!a.rail->capabilities().read) GTEST_SKIP() << "reads are turned off here";
  Link link(a, b);
  fill(b.region, 9);
  for (const uint64_t length : {uint64_t{1}, uint64_t{4097}, uint64_t{300001}}) {
    std::fill(a.region.begin(), a.region.end(), 0xee);
    WorkRequest request = link.write(11, 5, length, length);
    request.kind = WorkKind::kRead;
    link.post(request, {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return !a.done.empty() && a.done.back().first == length; }));
    EXPECT_TRUE(a.done.back().second.ok());
    EXPECT_EQ(std::memcmp(a.region.data() + 11, b.region.data() + 5, length), 0);
    EXPECT_EQ(a.region[10], 0xee);
    EXPECT_EQ(a.region[11 + length], 0xee);
  }
}

TEST_P(LibfabricRail, MessagesBothWaysInOrder) {
  Side a(spec()), b(spec());
  Link there(a, b), back(b, a);
  std::vector<std::string> sent;
  for (size_t i = 0; i < 600; ++i)
    sent.emplace_back(i % 50 == 0 ? kMaxMessageBytes + 1024 : i % 257, static_cast<char>('a' + i % 26));
  for (size_t i = 0; i < sent.size(); ++i) {
    there.post(there.message(sent[i], i), {&a, &b});
    if (i % 7 == 0) back.post(back.message(sent[i], i), {&a, &b});
  }
  ASSERT_TRUE(pump_until(
      {&a, &b}, [&] { return b.messages.size() == sent.size() && a.messages.size() == (sent.size() + 6) / 7; }));
  EXPECT_EQ(b.messages, sent);
  for (size_t i = 0; i < a.messages.size(); ++i) EXPECT_EQ(a.messages[i], sent[i * 7]);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == sent.size(); }));
}

// Of all TCP sockets of this process.
uint64_t received_bytes() {
  uint64_t bytes = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0) bytes += info.tcpi_bytes_received;
  }
  return bytes;
}

TEST(LibfabricAnswers, OneProvesAMessageAndTheWriteBehindIt) {
  constexpr uint64_t kRounds = 50, kAnswerBytes = 16;
  Side a(spec_of("tcp")), b(spec_of("tcp"));
  Link link(a, b);
  const std::string text = "a note";
  const auto cost = [&](size_t at_once) {
    const uint64_t before = received_bytes();
    for (uint64_t round = 0; round < kRounds; ++round) {
      const std::array<WorkRequest, 2> requests{link.message(text, 1), link.write_imm(0, 0, 4096, 2, 5)};
      const size_t done = a.done.size(), messages = b.messages.size(), imms = b.imms.size();
      for (size_t i = 0; i < requests.size(); i += at_once)
        EXPECT_EQ(a.rail->post({&requests[i], at_once}).accepted, at_once);
      EXPECT_TRUE(pump_until({&a, &b}, [&] {
        return a.done.size() == done + 2 && b.messages.size() == messages + 1 && b.imms.size() == imms + 1;
      }));
    }
    return received_bytes() - before;
  };
  (void)cost(2);  // connects
  EXPECT_LE(cost(2) + kRounds * kAnswerBytes, cost(1));
}

// More messages than there are receive buffers, while nobody polls the receiver: nothing is lost, the sender gets kBusy.
TEST_P(LibfabricRail, MessagesToASleepingPeerAreKept) {
  Side a(spec()), b(spec());
  Link link(a, b);
  link.post(link.message("hello", 0), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.messages.size() == 1; }));
  size_t posted = 1, busy = 0;
  const std::string text(9000, 'x');
  for (; busy < 1000 && posted < 3000; a.pump()) {
    const WorkRequest request = link.message(text, posted);
    a.rail->post({&request, 1}).accepted == 1 ? ++posted : ++busy;
  }
  EXPECT_GT(posted, 128u);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.messages.size() == posted && a.done.size() == posted; }));
}

TEST_P(LibfabricRail, Signals) {
  Side a(spec()), b(spec());
  Link there(a, b), back(b, a);
  for (uint32_t i = 0; i < 200; ++i) {
    there.post(there.signal(i, 0xfffff000u + i), {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == i + 1; }));
    EXPECT_EQ(b.imms.back(), 0xfffff000u + i);
    back.post(back.signal(i, i), {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.imms.size() == i + 1; }));
  }
}

TEST_P(LibfabricRail, ThousandsOutstandingBusyAndRecovery) {
  constexpr uint64_t kCount = 20000;
  Side a(spec()), b(spec());
  Link link(a, b);
  uint64_t posted = 0, busy = 0;
  while (posted < kCount) {
    std::array<WorkRequest, 100> batch;
    for (uint64_t i = 0; i < batch.size(); ++i)
      batch[i] = link.write_imm(0, (posted + i) % 1000 * 64, 64, posted + i, static_cast<uint32_t>(posted + i));
    const PostResult result = a.rail->post(batch);
    posted += result.accepted;
    if (result.accepted == batch.size()) continue;  // as deep as it goes, without polling
    EXPECT_EQ(result.status.code, StatusCode::kBusy);
    ++busy;
    a.pump();
    b.pump();
  }
  EXPECT_GT(busy, 0u);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == posted && b.imms.size() == posted; }));
  for (uint64_t i = 0; i < posted; ++i) {
    EXPECT_EQ(a.done[i].first, i);
    EXPECT_TRUE(a.done[i].second.ok());
    EXPECT_EQ(b.imms[i], i);
  }
}

TEST_P(LibfabricRail, SmallEventArraysLoseNothing) {
  Side a(spec()), b(spec());
  Link link(a, b);
  for (uint32_t i = 0; i < 50; ++i) link.post(link.write_imm(0, 0, 64, i, i), {});
  uint64_t done = 0, came = 0;
  const uint64_t deadline = now_ns() + kPatience;
  while ((done < 50 || came < 50) && now_ns() < deadline) {
    RailEvent event;
    for (Side* side : {&a, &b}) {
      if (side->rail->poll({&event, 1}) == 0) continue;
      event.kind == RailEventKind::kDone ? ++done : ++came;
    }
  }
  EXPECT_EQ(done, 50u);
  EXPECT_EQ(came, 50u);
}

TEST_P(LibfabricRail, SeveralPeersAndSelf) {
  Side a(spec()), b(spec()), c(spec());
  Link ab(a, b), ac(a, c), aa(a, a);
  fill(a.region, 4);
  for (uint32_t i = 0; i < 64; ++i) {
    ab.post(ab.write_imm(i, i * 8000, 7001, 3 * i, i), {&a, &b, &c});
    ac.post(ac.write_imm(i, i * 8000, 7001, 3 * i + 1, i), {&a, &b, &c});
    aa.post(aa.signal(3 * i + 2, i), {&a, &b, &c});
  }
  ASSERT_TRUE(pump_until({&a, &b, &c}, [&] {
    return b.imms.size() == 64 && c.imms.size() == 64 && a.imms.size() == 64 && a.done.size() == 192;
  }));
  for (uint32_t i = 0; i < 64; ++i) {
    EXPECT_EQ(std::memcmp(a.region.data() + i, b.region.data() + i * 8000, 7001), 0);
    EXPECT_EQ(std::memcmp(a.region.data() + i, c.region.data() + i * 8000, 7001), 0);
  }
}

TEST_P(LibfabricRail, DestroyedWithWorkInFlight) {
  Side b(spec(), 64 << 20);
  {
    Side a(spec(), 64 << 20);
    Link link(a, b);
    for (uint64_t i = 0; i < 8; ++i) link.post(link.write_imm(0, 0, 60 << 20, i, 1), {&a});
    a.rail.reset();  // memory and handles go later, as a careless owner would do it
  }
  Side c(spec());
  Link again(c, b);
  const size_t before = b.imms.size();
  again.post(again.signal(1, 77), {&b, &c});
  ASSERT_TRUE(pump_until({&b, &c}, [&] { return b.imms.size() > before && b.imms.back() == 77; }));
}

// The answer leaves behind the target's word on what was written before it. Nobody asks for that word but the rail itself: not while it
// polls, and not while it is asking others, as here, where the question may come before it begins or later.
TEST_P(LibfabricRail, TwoRailsThatReleaseAtOnceAnswerEachOther) {
  Side a(spec()), b(spec());
  Link there(a, b), back(b, a);
  std::vector<uint8_t> bytes(8192);
  const auto settled = [&](size_t count) {
    return pump_until({&a, &b}, [&] { return a.done.size() == count && b.done.size() == count; });
  };
  size_t written = 0;
  for (int round = 0; round < 300; ++round) {
    std::string key;
    std::unique_ptr<LocalMemory> from_a, from_b;
    const Memory one{bytes.data(), 4096, kHostDevice, -1, kAccessRemoteWrite};
    const Memory other{bytes.data() + 4096, 4096, kHostDevice, -1, kAccessRemoteWrite};
    ASSERT_TRUE(a.rail->register_memory(one, &from_a, &key).ok());
    ASSERT_TRUE(b.rail->register_memory(other, &from_b, &key).ok());
    for (uint64_t i = 0; i < 3; ++i, ++written) {
      there.post(there.write(0, 0, 64, written), {&a, &b});
      back.post(back.write(0, 0, 64, written), {&a, &b});
      if (round == 0) {
        ASSERT_TRUE(settled(written + 1));  // connected
      }
    }
    Status status;
    std::atomic<int> ended{0};  // partners: the two loops below; who was faster is still asked
    std::thread releasing([&] {
      status = a.rail->release_memory(from_a, 3 * kSecond);
      for (++ended; ended < 2;) a.pump();
    });
    for (int polls = round % 10; polls > 0; --polls) b.pump();
    const Status mine = b.rail->release_memory(from_b, 3 * kSecond);
    for (++ended; ended < 2;) b.pump();
    releasing.join();
    ASSERT_TRUE(status.ok() && mine.ok())
        << round << ": " << status_text(status.code) << ", " << status_text(mine.code);
    ASSERT_TRUE(settled(written));
  }
}

TEST_P(LibfabricRail, ReleasedWhileTheWriterAsksForNothingMore) {
  Side a(spec()), b(spec());
  Link there(a, b), back(b, a);
  std::vector<uint8_t> bytes(4096);
  std::unique_ptr<LocalMemory> released;
  std::string key;
  ASSERT_TRUE(b.rail->register_memory({bytes.data(), 4096, kHostDevice, -1, kAccessRemoteWrite}, &released, &key).ok());
  there.post(there.write(0, 0, 64, 0), {&a, &b});
  back.post(back.write(0, 0, 64, 0), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 1 && b.done.size() == 1; }));
  for (uint64_t tag = 1; tag < 4; ++tag) there.post(there.write(0, 0, 64, tag), {});
  Status status = StatusCode::kInternal;
  std::atomic<bool> ended{false};  // partner: the loop below
  std::thread releasing([&] {
    status = b.rail->release_memory(released, 3 * kSecond);
    ended = true;
  });
  while (!ended) a.pump();
  releasing.join();
  EXPECT_TRUE(status.ok()) << status_text(status.code);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 4; }));
}

// The answers come behind more messages than there are receives, and nobody polls; the messages come with the next polls.
// A question of a rail that we disconnected from arrives while finished connections are forgotten: the connection that is opened for the
// answer is not forgotten with them.
TEST_P(LibfabricRail, AskedWhileItForgetsConnections) {
  Side a(spec()), b(spec()), c(spec());
  Link there(a, b), back(b, a);
  there.post(there.signal(1, 1), {&a, &b});
  back.post(back.signal(1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.imms.size() == 1 && b.imms.size() == 1 && a.done.size() == 1; }));
  { Link dropped(a, c); }  // not disconnected: forgotten at the next connect()
  ASSERT_TRUE(pump_until({&a, &b, &c}, [rounds = 0]() mutable { return ++rounds > 1000; }));
  EXPECT_TRUE(a.rail->disconnect(*there.peer).ok());
  mallopt(M_PERTURB, 0x5a);  // what is used after it was freed shows
  if (!b.rail->release_memory(b.memory, kSecond / 50).ok()) {
    Link again(a, c);
    ASSERT_TRUE(pump_until({&a, &c}, [rounds = 0]() mutable { return ++rounds > 1000; }));
    std::thread other([&] { EXPECT_TRUE(b.rail->release_memory(b.memory, 10 * kSecond).ok()); });
    std::atomic<bool> stop{false};
    std::thread pump([&] {
      while (!stop) a.pump();
    });
    other.join();
    stop = true;
    pump.join();
  }
  mallopt(M_PERTURB, 0);
}

// A rail that nobody asks to release anything for weeks meets more connections that end than it can take note of at once.
TEST(LibfabricInbound, ThereIsRoomForNewcomersHoweverManyWereThereBefore) {
  using libfabric::InboundList;
  InboundList list;
  const libfabric::RailAddress living{.name = "living"}, dead{.name = "dead"};
  const auto refuses = [&](const libfabric::RailAddress& sender) { return sender.name == dead.name; };
  InboundList::Clock::time_point now{std::chrono::hours(1)};
  std::vector<uint64_t> asked;
  const auto ask = [&](const InboundList::One& one) { asked.push_back(one.connection); };
  constexpr uint64_t kMany = 3 * InboundList::kMost, kStays = 7;
  size_t most = 0;
  for (uint64_t connection = 1; connection <= kMany; ++connection) {
    // Every third sender has died; of the living one all connections but the seventh have ended, and it reports that when it is asked.
    ASSERT_TRUE(list.add(connection, connection % 3 == 0 ? dead : living)) << connection;
    list.look_after(now, ask, refuses);
    for (const uint64_t each : std::exchange(asked, {}))
      if (each % 3 != 0) list.answer(each, 1, each != kStays, "");
    now += std::chrono::milliseconds(300);
    most = std::max(most, list.size());
  }
  EXPECT_LT(most, 64u);
  EXPECT_TRUE(std::any_of(list.begin(), list.end(), [](const auto& one) { return one.connection == kStays; }));
  EXPECT_TRUE(list.any_gone_lately(now)) << "what the kernel holds of their streams is not waited for";
}

// Who does not answer at once is not probed at once: it may have been asked a moment ago.
TEST(LibfabricInbound, OneThatWasJustAskedHasTimeToAnswer) {
  using libfabric::InboundList;
  InboundList list;
  const InboundList::Clock::time_point now{std::chrono::hours(1)};
  size_t asked = 0;
  for (uint64_t connection = 1; connection <= 200; ++connection) {
    ASSERT_TRUE(list.add(connection, {}));
    list.look_after(
        now, [&](const auto&) { ++asked; },
        [](const auto&) {
          ADD_FAILURE() << "probed";
          return false;
        });
  }
  EXPECT_EQ(list.size(), 200u);
  EXPECT_GT(asked, 150u);
  EXPECT_LE(asked, 200u);
  EXPECT_TRUE(list.any_open(1));
}

TEST_P(LibfabricRail, ReleasedWhileMessagesPourIn) {
  Side hub(spec());
  Side a(spec()), b(spec()), c(spec());
  std::vector<std::unique_ptr<Link>> links;
  for (Side* side : {&a, &b, &c}) {
    links.push_back(std::make_unique<Link>(*side, hub));
    links.back()->post(links.back()->write(0, 0, 64, 1), {side, &hub});
    ASSERT_TRUE(pump_until({side, &hub}, [&] { return side->done.size() == 1; }));
  }
  const std::string text(kMaxMessageBytes, 'x');
  for (const auto& link : links)
    for (uint64_t i = 0; i < 64; ++i) link->post(link->message(text, 2 + i), {});
  Status status = StatusCode::kInternal;
  std::atomic<bool> ended{false};  // partner: the loop below
  std::thread releasing([&] {
    status = hub.rail->release_memory(hub.memory, 30 * kSecond);  // under a sanitizer ofi_rxm takes ten for these
    ended = true;
  });
  while (!ended)
    for (Side* side : {&a, &b, &c}) side->pump();
  releasing.join();
  EXPECT_TRUE(status.ok()) << status_text(status.code);
  ASSERT_TRUE(pump_until({&hub, &a, &b, &c}, [&] { return hub.messages.size() == 3 * 64; }));
  for (const std::string& message : hub.messages) EXPECT_EQ(message, text);
}

INSTANTIATE_TEST_SUITE_P(Providers, LibfabricRail, kProfiles,
                         [](const auto& info) { return name_of_profile(info.param); });

}  // namespace
}  // namespace asyncfabric::testing
