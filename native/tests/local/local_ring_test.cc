// local_ring_test.cc: messages and immediates through a connection's ring: wrap-around, sizes, a full ring that reports
// busy and recovers, and producers and consumers that are lied to.
#include "local_rig.h"
#include "providers/local/transfers/ring.h"

namespace asyncfabric {
namespace {

using namespace local_rig;

std::string bytes_of(uint64_t seed, size_t length) {
  std::mt19937_64 random(seed);
  std::string text(length, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

TEST(LocalMessages, AllSizesArriveInOrderWithImmediatesBetween) {
  Endpoint sender(Words{{"ring", "8"}});
  Endpoint receiver;
  auto peer = sender.connect(receiver);
  std::vector<std::string> sent;
  uint64_t seed = 0;
  for (int round = 0; round < 60; ++round)
    for (const size_t length : {0ul, 1ul, 47ul, 48ul, 49ul, 4096ul, 9216ul, 16384ul})
      sent.push_back(bytes_of(++seed, length));
  std::vector<WorkRequest> batch;
  for (size_t i = 0; i < sent.size(); ++i) {
    batch.push_back(message(*peer, sent[i], i + 1));
    batch.push_back(signal(*peer, static_cast<uint32_t>(i), 100'000 + i));
  }
  sender.post(batch, [&] { receiver.poll(); });
  ASSERT_TRUE(eventually({&sender, &receiver}, [&] { return receiver.messages.size() == sent.size(); }));
  ASSERT_TRUE(eventually({&sender, &receiver}, [&] { return receiver.imms.size() == sent.size(); }));
  for (size_t i = 0; i < sent.size(); ++i) {
    ASSERT_EQ(receiver.messages[i], sent[i]) << i;
    ASSERT_EQ(receiver.imms[i], i);
  }
  EXPECT_GT(sender.busy, 0u) << "a ring of eight entries was never full";
  ASSERT_TRUE(eventually({&sender}, [&] { return sender.done.size() == batch.size(); }));
}

TEST(LocalMessages, TooLongIsRefused) {
  Endpoint sender;
  Endpoint receiver;
  auto peer = sender.connect(receiver);
  const std::string long_text(16385, 'x');
  sender.post({message(*peer, long_text, 1), message(*peer, "short", 2)});
  ASSERT_TRUE(
      eventually({&sender, &receiver}, [&] { return receiver.messages.size() == 1 && sender.done.size() == 2; }));
  EXPECT_EQ(sender.done[1].code, StatusCode::kInvalidArgument);
  EXPECT_EQ(receiver.messages[0], "short");
}

TEST(LocalRing, FullRingIsBusyForItsPeerAndRecovers) {
  Endpoint sender(Words{{"ring", "8"}});
  Endpoint sleeper;
  Endpoint awake;
  auto to_sleeper = sender.connect(sleeper);
  auto to_awake = sender.connect(awake);
  uint32_t count = 0;
  PostResult result;
  do {  // nobody polls the sleeper
    const WorkRequest request = signal(*to_sleeper, count, count);
    result = sender.rail->post({&request, 1});
    count += static_cast<uint32_t>(result.accepted);
    ASSERT_LE(count, 8 * 12u);
  } while (result.accepted == 1);
  EXPECT_EQ(result.status.code, StatusCode::kBusy);
  EXPECT_GE(count, 8u);
  std::vector<WorkRequest> mixed = {signal(*to_awake, 5, 1000), signal(*to_sleeper, count, count)};
  EXPECT_EQ(sender.rail->post(mixed).accepted, 1u);
  EXPECT_TRUE(eventually({&awake}, [&] { return awake.imms.size() == 1; }));

  while (sender.poll() > 0) {}
  ASSERT_TRUE(sender.rail->prepare_wait()) << "nothing to do until the target takes something";
  EXPECT_TRUE(eventually({&sleeper}, [&] { return sleeper.imms.size() == count; }));
  pollfd bed{sender.rail->wait_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&bed, 1, 5000), 1) << "the target made room and did not report it";
  sender.rail->cancel_wait();
  sender.post({signal(*to_sleeper, count, count)});
  EXPECT_TRUE(eventually({&sleeper}, [&] { return sleeper.imms.size() == count + 1; }));
  for (uint32_t i = 0; i <= count; ++i) EXPECT_EQ(sleeper.imms[i], i);
}

TEST(LocalRing, EventsComeInSmallPortions) {
  Endpoint sender;
  Endpoint receiver;
  auto peer = sender.connect(receiver);
  std::vector<WorkRequest> batch;
  for (uint32_t i = 0; i < 50; ++i) batch.push_back(signal(*peer, i, i));
  sender.post(batch);
  std::vector<uint32_t> got;
  RailEvent events[3];  // less than an entry carries
  ASSERT_TRUE(eventually({}, [&] {
    const size_t count = receiver.rail->poll(events);
    for (size_t i = 0; i < count; ++i) got.push_back(events[i].imm);
    return got.size() == 50;
  }));
  for (uint32_t i = 0; i < 50; ++i) EXPECT_EQ(got[i], i);
}

TEST(LocalRing, MoreBusyConnectionsThanHotSeats) {
  constexpr size_t kSenders = 40;
  constexpr uint32_t kEach = 300;
  Endpoint hub;
  Endpoint crowd;
  std::vector<std::unique_ptr<RailPeer>> peers;
  for (size_t i = 0; i < kSenders; ++i) peers.push_back(crowd.connect(hub));
  std::vector<uint32_t> next(kSenders, 0);
  size_t total = 0;
  hub.on_imm = [&](uint32_t imm) {
    ASSERT_EQ(imm % 1000, next[imm / 1000]++);
    ++total;
  };
  for (uint32_t i = 0; i < kEach; ++i) {
    std::vector<WorkRequest> batch;
    for (uint32_t sender = 0; sender < kSenders; ++sender)
      batch.push_back(signal(*peers[sender], sender * 1000 + i, 0));
    for (auto& request : batch) request.signalled = false;
    crowd.post(batch, [&] { hub.poll(); });
    if (i % 7 == 0) hub.poll();
  }
  EXPECT_TRUE(eventually({&hub}, [&] { return total == kSenders * kEach; }));
  EXPECT_TRUE(hub.rail->prepare_wait()) << "drained, and yet there is work";
  hub.rail->cancel_wait();
}

// News that should not wait for a long copy leaves before it, in an entry that was meant for more immediates.
TEST(LocalRing, LongCopiesBetweenImmediatesOverwriteNoEntry) {
  const struct {
    const char* what;
    Kind kind;
    Words options;
  } ways[] = {
      {"mapped", Kind::kMemfd, {{"ring", "8"}, {"copiers", "1"}}},
      {"mapped, several threads", Kind::kMemfd, {{"ring", "8"}, {"copiers", "2"}}},
      {"kernel", Kind::kForeign, {{"ring", "8"}, {"foreign", "cma"}}},
      {"bounced", Kind::kForeign, {{"ring", "8"}, {"foreign", "bounce"}}},
  };
  constexpr uint64_t kLong = 1 << 20;
  constexpr uint32_t kWrites = 41;
  for (const auto& way : ways) {
    SCOPED_TRACE(way.what);
    Endpoint sender(way.options);
    Endpoint receiver;
    auto peer = sender.connect(receiver);
    Block source(kLong);
    Block target(kLong, way.kind);
    const std::string key = target.enrol(receiver);
    const std::string own = source.enrol(sender);
    auto remote = attach(sender, *peer, key);
    std::vector<WorkRequest> batch;
    for (uint32_t i = 0; i < kWrites;
         ++i)  // an entry for the first, two for each pair: the last free one is for a signal
      batch.push_back(i % 2 != 0
                          ? signal(*peer, i, i)
                          : with_imm(transfer(WorkKind::kWrite, *peer, *remote, source.data(), 0, kLong / 2, i), i));
    for (WorkRequest& request : batch) request.local = source.handle.get();
    const PostResult full = sender.rail->post(batch);  // nobody polls the receiver
    EXPECT_EQ(full.status.code, StatusCode::kBusy);
    ASSERT_LT(full.accepted, batch.size());
    EXPECT_TRUE(eventually({&sender, &receiver}, [&] { return receiver.imms.size() == full.accepted; }))
        << full.accepted << " were taken, " << receiver.imms.size() << " arrived";
    batch.erase(batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(full.accepted));
    sender.post(batch, [&] { receiver.poll(); });
    EXPECT_TRUE(eventually({&sender, &receiver}, [&] { return receiver.imms.size() == kWrites; }));
    for (uint32_t i = 0; i < receiver.imms.size(); ++i) EXPECT_EQ(receiver.imms[i], i);
  }
}

std::shared_ptr<local::Mapping> raw_segment(uint32_t entries) {
  std::shared_ptr<local::Mapping> segment;
  UniqueFd fd;
  EXPECT_TRUE(
      local::Mapping::create(local::FileRole::kSegment, local::SegmentLayout(entries).total(), &segment, &fd).ok());
  return segment;
}

TEST(LocalRing, ProducerIgnoresALyingConsumer) {
  auto segment = raw_segment(8);
  local::RingProducer producer(segment, 8);
  const local::EntryBody body{};
  for (int i = 0; i < 8; ++i) producer.publish(body);
  ASSERT_FALSE(producer.has_room(1));
  auto& head = segment->as<local::SegmentHeader>()->head;
  for (const uint64_t lie : {uint64_t{9}, uint64_t{1000}, ~uint64_t{0}}) {
    head.store(lie);
    EXPECT_FALSE(producer.has_room(1)) << lie;
  }
  head.store(5);
  EXPECT_TRUE(producer.has_room(5));
  EXPECT_FALSE(producer.has_room(6));
  head.store(2);  // backwards
  EXPECT_TRUE(producer.has_room(5));
}

// The verdict of an entry lies where the entry `entries` later puts its own.
TEST(LocalRing, NoVerdictIsOverwrittenBeforeItWasTaken) {
  auto segment = raw_segment(8);
  local::RingProducer producer(segment, 8);
  uint32_t offset = 0;
  ASSERT_TRUE(producer.reserve(64, ~uint64_t{0}, &offset));
  const uint64_t bounced = producer.publish({});
  for (int i = 0; i < 7; ++i) producer.publish({});  // immediates, which hold no staging bytes
  segment->as<local::SegmentHeader>()->head.store(8);
  ASSERT_TRUE(producer.has_room(1)) << "all were consumed";
  EXPECT_FALSE(producer.reserve(64, bounced, &offset)) << "nobody looked at the first verdict";
  EXPECT_TRUE(producer.reserve(64, bounced + 1, &offset));
}

TEST(LocalRing, StagingSpansNeverOverlapWhileLive) {
  constexpr uint32_t kEntries = 64;
  auto segment = raw_segment(kEntries);
  local::RingProducer producer(segment, kEntries);
  auto& head = segment->as<local::SegmentHeader>()->head;
  std::mt19937_64 random(7);
  struct Span {
    uint64_t position;
    uint64_t begin;
    uint64_t end;
  };
  std::vector<Span> live;
  const auto consume_to = [&](uint64_t position) {
    head.store(std::max(head.load(), position));
    std::erase_if(live, [&](const Span& span) { return span.position < head.load(); });
  };
  size_t refused = 0;
  for (int step = 0; step < 20'000; ++step) {
    if (random() % 3 == 0 && !live.empty()) consume_to(live[random() % live.size()].position + 1);
    const auto length = static_cast<uint32_t>(1 + random() % (random() % 4 == 0 ? local::kMaxRequestBytes : 20'000));
    uint32_t offset = 0;
    if (!producer.has_room(1) || !producer.reserve(length, ~uint64_t{0}, &offset)) {
      ++refused;
      if (!live.empty()) consume_to(live[live.size() / 2].position + 1);
      continue;
    }
    ASSERT_LE(offset + uint64_t{length}, local::kStagingBytes);
    for (const Span& span : live)
      ASSERT_TRUE(offset >= span.end || offset + uint64_t{length} <= span.begin) << "step " << step;
    live.push_back({producer.publish({}), offset, offset + uint64_t{length}});
  }
  EXPECT_GT(refused, 100u);
}

}  // namespace
}  // namespace asyncfabric
