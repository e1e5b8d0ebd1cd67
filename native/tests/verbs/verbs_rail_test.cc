// verbs_rail_test.cc: the provider contract over two RDMA devices, two rails in one process, post and poll driven by hand.
#include <cstring>

#include "verbs_rig.h"

namespace asyncfabric::verbs_rig {
namespace {

TEST(VerbsRail, StatesWhatWasOpened) {
  NEED_VERBS();
  Side side(device_a());
  const RailInfo info = side.rail->info();
  EXPECT_EQ(info.provider, "verbs");
  EXPECT_EQ(info.device, device_a());
  EXPECT_NE(info.library.find("libibverbs"), std::string::npos);
  EXPECT_EQ(info.library.front(), '/');
  EXPECT_NE(info.version.find("GID"), std::string::npos);
  EXPECT_TRUE(info.ordered);
  EXPECT_LE(side.rail->address().size(), 512u);
  EXPECT_LE(side.key.size(), 128u);
  EXPECT_GE(side.rail->capabilities().max_send_bytes, kMaxMessageBytes + 1024);
  EXPECT_LE(side.rail->capabilities().max_request_bytes, 1ull << 30);
}

TEST(VerbsRail, WritesOddSizesAtOddOffsetsAndNothingElse) {
  NEED_VERBS();
  constexpr size_t kRegion = 5 << 20;
  Side a(device_a(), {}, kRegion), b(device_b(), {}, kRegion);
  Link link(a, b);
  uint64_t seed = 1;
  for (const uint64_t length : {1ull, 2ull, 63ull, 64ull, 65ull, 219ull, 220ull, 221ull, 4095ull, 4096ull, 4097ull,
                                8191ull, 8192ull, 8193ull, 65535ull, 65537ull, (1ull << 20) + 1, (4ull << 20) + 3}) {
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
TEST(VerbsRail, ImmediateComesAfterAllEarlierData) {
  NEED_VERBS();
  constexpr uint32_t kRounds = 100, kPages = 16;
  constexpr uint64_t kPage = 6000;
  Side a(device_a()), b(device_b());
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

TEST(VerbsRail, QuietRequestsAreSilentAndASignalledOneComesLast) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  Link link(a, b);
  for (uint64_t i = 0; i < 100; ++i) {
    WorkRequest request = link.write(i * 64, i * 64, i % 2 == 0 ? 64 : 5000, 1000 + i);
    request.signalled = false;
    link.post(request, {&a, &b});
  }
  WorkRequest read = link.write(0, 0, 64, 7);
  read.kind = WorkKind::kRead;
  link.post(read, {&a, &b});
  link.post(link.write(0, 0, 64, 42), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 2; }));
  EXPECT_EQ(a.done[0].first, 7u);
  EXPECT_EQ(a.done[1].first, 42u);
  EXPECT_TRUE(a.done[1].second.ok());
}

TEST(VerbsRail, Reads) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
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

TEST(VerbsRail, MessagesBothWaysInOrder) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  Link there(a, b), back(b, a);
  std::vector<std::string> sent;
  for (size_t i = 0; i < 600; ++i)
    sent.emplace_back(i % 50 == 0 ? kMaxMessageBytes + 1024 : i % 257, static_cast<char>('a' + i % 26));
  for (size_t i = 0; i < sent.size(); ++i) {
    there.post(there.message(sent[i], i), {&a, &b});
    if (i % 7 == 0) back.post(back.message(sent[i], i), {&a, &b});
  }
  ASSERT_TRUE(pump_until(
      {&a, &b}, [&] { return b.messages.size() == sent.size() && a.messages.size() == (sent.size() + 6) / 7; }))
      << a.messages.size() << " and " << b.messages.size() << " came, " << a.done.size() << " and " << b.done.size()
      << " left";
  EXPECT_EQ(b.messages, sent);
  for (size_t i = 0; i < a.messages.size(); ++i) EXPECT_EQ(a.messages[i], sent[i * 7]);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == sent.size(); }));
}

// Credits: a sender never has more under way than the receiver has receives for, so nobody meets an empty queue.
TEST(VerbsRail, MessagesToASleepingPeerAreKept) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  Link link(a, b);
  link.post(link.message("hello", 0), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.messages.size() == 1; }));
  size_t posted = 1, busy = 0;
  const std::string text(9000, 'x');
  for (; busy < 1000 && posted < 3000; a.pump()) {
    const WorkRequest request = link.message(text, posted);
    a.rail->post({&request, 1}).accepted == 1 ? ++posted : ++busy;
  }
  EXPECT_GT(posted, 32u);
  EXPECT_GE(busy, 1000u);
  EXPECT_LE(a.done.size(), 1u + verbs::kWindow) << "more messages are under way than receives were promised";
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.messages.size() == posted && a.done.size() == posted; }));
}

TEST(VerbsRail, Signals) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  Link there(a, b), back(b, a);
  for (uint32_t i = 0; i < 200; ++i) {
    there.post(there.signal(i, 0xfffff000u + i), {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == i + 1; }));
    EXPECT_EQ(b.imms.back(), 0xfffff000u + i);
    back.post(back.signal(i, i), {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.imms.size() == i + 1; }));
  }
}

TEST(VerbsRail, ThousandsOutstandingBusyAndRecovery) {
  NEED_VERBS();
  constexpr uint64_t kCount = 5000;
  Side a(device_a()), b(device_b());
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

TEST(VerbsRail, SmallEventArraysLoseNothing) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  Link link(a, b);
  for (uint32_t i = 0; i < 50; ++i) link.post(link.write_imm(0, 0, 64, i, i), {&a, &b});
  size_t done = a.done.size(), came = b.imms.size();
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

TEST(VerbsRail, SeveralPeersAndSelf) {
  NEED_VERBS();
  Side a(device_a()), b(device_b()), c(device_a());
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

TEST(VerbsRail, DestroyedWithWorkInFlight) {
  NEED_VERBS();
  Side b(device_b(), {}, 16 << 20);
  {
    Side a(device_a(), {}, 16 << 20);
    Link link(a, b);
    for (uint64_t i = 0; i < 4; ++i) link.post(link.write_imm(0, 0, 7 << 20, i, 1), {&a});
    a.rail.reset();  // memory and handles go later, as a careless owner would do it
  }
  Side c(device_a());
  Link again(c, b);
  const size_t before = b.imms.size();
  again.post(again.signal(1, 77), {&b, &c});
  ASSERT_TRUE(pump_until({&b, &c}, [&] { return b.imms.size() > before && b.imms.back() == 77; }));
}

TEST(VerbsRail, OptionsAreHonoured) {
  NEED_VERBS();
  for (const Words& options :
       {Words{{"gid", "1"}, {"port", "1"}, {"mtu", "1024"}, {"traffic_class", "96"}, {"service_level", "1"}},
        Words{{"qps", "1"}, {"depth", "16"}, {"chain", "1"}, {"relaxed_ordering", "0"}, {"pkey", "0"}}}) {
    Side a(device_a(), options), b(device_b());
    EXPECT_NE(a.rail->info().version.find("GID 1"), std::string::npos) << a.rail->info().version;
    Link link(a, b), back(b, a);
    for (uint32_t i = 0; i < 40; ++i) {
      link.post(i % 4 == 0 ? link.signal(i, i) : link.write_imm(0, i * 5000, 5000, i, i), {&a, &b});
      back.post(back.signal(i, i), {&a, &b});
    }
    ASSERT_TRUE(
        pump_until({&a, &b}, [&] { return a.imms.size() == 40 && b.imms.size() == 40 && a.done.size() == 40; }));
    EXPECT_EQ(a.failed(), 0u);
    if (options.front().first != "qps") continue;
    for (uint32_t i = 0; i < 40; ++i) EXPECT_EQ(b.imms[i], i) << "one queue pair keeps all in order";
  }
}

// 256 connections at the same moment, all with something to send.
TEST(VerbsRail, ManyConnectionsAtOnce) {
  NEED_VERBS();
  constexpr uint32_t kConnections = 256;
  const Words small = {{"depth", "16"}};
  Side a(device_a(), small), b(device_b(), small);
  std::vector<std::unique_ptr<Link>> links;
  for (uint32_t i = 0; i < kConnections; ++i) links.push_back(std::make_unique<Link>(a, b));
  for (uint32_t i = 0; i < kConnections; ++i) links[i]->post(links[i]->write_imm(0, i * 64, 64, i, i), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == kConnections && a.done.size() == kConnections; }));
  EXPECT_EQ(a.failed(), 0u);
  std::sort(b.imms.begin(), b.imms.end());
  for (uint32_t i = 0; i < kConnections; ++i) EXPECT_EQ(b.imms[i], i);
}

}  // namespace
}  // namespace asyncfabric::verbs_rig
