// fault_rail_test.cc: every fault of the plan, over the in-memory loopback rail, post and poll driven by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "rigs/loopback_rail.h"

namespace asyncfabric {

Status open_fault_rail(const RailSpec& spec, OpenRail inner, std::unique_ptr<Rail>* out, std::string* detail);

namespace {

using testing::LoopbackRail;
using testing::open_loopback_rail;
using Options = std::vector<std::pair<std::string, std::string>>;

constexpr uint64_t kDeadline = ~0ull;

// A writer behind faults and a plain target, one region of 4 KiB each.
struct Pair {
  std::unique_ptr<Rail> writer;
  std::unique_ptr<Rail> target;
  std::vector<uint8_t> source = std::vector<uint8_t>(4096, 7);
  std::vector<uint8_t> memory = std::vector<uint8_t>(4096, 0);
  std::unique_ptr<LocalMemory> local;
  std::unique_ptr<LocalMemory> exposed;
  std::unique_ptr<RemoteMemory> remote;
  std::unique_ptr<RailPeer> peer;
  std::string key;

  explicit Pair(const Options& options) {
    std::string detail;
    EXPECT_TRUE(open_fault_rail({"fault+loopback", "", options}, open_loopback_rail, &writer, &detail).ok()) << detail;
    EXPECT_TRUE(open_loopback_rail({"loopback", "", {}}, &target, &detail).ok());
    std::string unused;
    EXPECT_TRUE(writer->register_memory({source.data(), 4096, kHostDevice, -1, kAccessLocal}, &local, &unused).ok());
    EXPECT_TRUE(
        target->register_memory({memory.data(), 4096, kHostDevice, -1, kAccessRemoteWrite}, &exposed, &key).ok());
    EXPECT_TRUE(writer->connect(target->address(), kDeadline, &peer).ok());
    EXPECT_TRUE(writer->attach(*peer, key, kDeadline, &remote).ok());
  }

  WorkRequest write(uint64_t tag, uint64_t offset, uint64_t length) const {
    WorkRequest request;
    request.has_imm = true;
    request.imm = static_cast<uint32_t>(tag);
    request.peer = peer.get();
    request.local = local.get();
    request.remote = remote.get();
    request.address = source.data() + offset;
    request.remote_offset = offset;
    request.length = length;
    request.tag = tag;
    return request;
  }

  // Posts `count` one-byte writes with tags 1.., polling while the rail is busy.
  size_t post_writes(size_t count, std::vector<RailEvent>* events) const {
    size_t refusals = 0;
    for (uint64_t tag = 1; tag <= count;) {
      const WorkRequest request = write(tag, tag, 1);
      if (writer->post({&request, 1}).accepted == 1) {
        ++tag;
      } else {
        ++refusals;
        poll(*writer, events);
      }
    }
    return refusals;
  }

  static size_t poll(Rail& rail, std::vector<RailEvent>* events) {
    RailEvent batch[16];
    const size_t count = rail.poll(batch);
    events->insert(events->end(), batch, batch + count);
    return count;
  }

  std::vector<RailEvent> drain(Rail& rail, size_t expected) const {
    std::vector<RailEvent> events;
    for (int spins = 0; events.size() < expected && spins < 100000; ++spins) { poll(rail, &events); }
    return events;
  }
};

std::vector<uint64_t> tags_of(const std::vector<RailEvent>& events) {
  std::vector<uint64_t> tags;
  for (const RailEvent& event : events)
    if (event.kind == RailEventKind::kDone) tags.push_back(event.tag);
  return tags;
}

bool is_permutation_up_to(std::vector<uint64_t> tags, uint64_t count) {
  std::sort(tags.begin(), tags.end());
  for (uint64_t i = 0; i < tags.size(); ++i)
    if (tags[i] != i + 1) return false;
  return tags.size() == count;
}

TEST(FaultRail, WithoutFaultsIsTheInnerRail) {
  Pair pair(Options{});
  EXPECT_EQ(pair.writer->info().provider, "fault+loopback");
  EXPECT_TRUE(pair.writer->capabilities().ordered);
  std::vector<RailEvent> events;
  pair.post_writes(20, &events);
  EXPECT_EQ(tags_of(pair.drain(*pair.writer, 20)).back(), 20u);
  EXPECT_EQ(pair.memory[20], 7);
  EXPECT_EQ(pair.memory[21], 0);
}

TEST(FaultRail, OtherOptionsGoToTheInnerRail) {
  const Pair pair(Options{{"read", "0"}});
  EXPECT_FALSE(pair.writer->capabilities().read);
}

TEST(FaultRail, RefusesMalformedOptionsNamesAndDevicesWithoutImmediates) {
  std::unique_ptr<Rail> rail;
  std::string detail;
  for (const char* value : {"", "-1", "1x", "99999999999999999999999"}) {
    EXPECT_EQ(open_fault_rail({"fault+loopback", "", {{"delay_us", value}}}, open_loopback_rail, &rail, &detail).code,
              StatusCode::kInvalidArgument);
    EXPECT_NE(detail.find("delay_us"), std::string::npos);
  }
  EXPECT_EQ(open_fault_rail({"fault+", "", {}}, open_loopback_rail, &rail, &detail).code, StatusCode::kInvalidArgument);
  EXPECT_EQ(open_fault_rail({"fault+none", "", {}}, open_loopback_rail, &rail, &detail).code, StatusCode::kNoProvider);
  EXPECT_EQ(open_fault_rail({"fault+loopback", "", {{"no_immediates", "1"}}}, open_loopback_rail, &rail, &detail).code,
            StatusCode::kNoProvider);
  EXPECT_NE(detail.find("immediate"), std::string::npos);
  const OpenRail picky = [](const RailSpec&, std::unique_ptr<Rail>*, std::string* text) -> Status {
    *text = "an option nobody knows";
    return StatusCode::kInvalidArgument;
  };
  EXPECT_FALSE(open_fault_rail({"fault+loopback", "", {{"sed", "7"}}}, picky, &rail, &detail).ok());
  EXPECT_NE(detail.find("options of a fault rail are seed, reorder, delay_us"), std::string::npos) << detail;
  EXPECT_FALSE(open_fault_rail({"fault+loopback", "", {{"seed", "7"}}}, picky, &rail, &detail).ok());
  EXPECT_EQ(detail.find("options of a fault rail"), std::string::npos) << detail;
  EXPECT_EQ(rail, nullptr);
}

TEST(FaultRail, ReordersBySeedAndLosesNothing) {
  std::vector<uint64_t> orders[3];
  const char* seeds[] = {"7", "7", "8"};
  for (int i = 0; i < 3; ++i) {
    Pair pair(Options{{"reorder", "16"}, {"seed", seeds[i]}});
    EXPECT_FALSE(pair.writer->capabilities().ordered);
    std::vector<RailEvent> events;
    pair.post_writes(64, &events);
    orders[i] = tags_of(pair.drain(*pair.writer, 64));
    EXPECT_TRUE(is_permutation_up_to(orders[i], 64));
    EXPECT_FALSE(std::is_sorted(orders[i].begin(), orders[i].end()));
    for (uint64_t offset = 1; offset <= 64; ++offset) EXPECT_EQ(pair.memory[offset], 7);
  }
  EXPECT_EQ(orders[0], orders[1]);
  EXPECT_NE(orders[0], orders[2]);
}

TEST(FaultRail, HoldsForTheDelayAndRefusesSleepMeanwhile) {
  Pair pair(Options{{"delay_us", "5000"}});
  EXPECT_TRUE(pair.writer->capabilities().ordered);
  const auto start = std::chrono::steady_clock::now();
  std::vector<RailEvent> events;
  pair.post_writes(3, &events);
  Pair::poll(*pair.writer, &events);
  if (std::chrono::steady_clock::now() - start < std::chrono::microseconds(5000)) {
    EXPECT_TRUE(events.empty());
    EXPECT_EQ(pair.memory[1], 0);
    EXPECT_FALSE(pair.writer->prepare_wait());
  }
  while (events.size() < 3) Pair::poll(*pair.writer, &events);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::microseconds(5000));
  EXPECT_EQ(tags_of(events), (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_TRUE(pair.writer->prepare_wait());
  pair.writer->cancel_wait();
}

TEST(FaultRail, FailedRequestsAreNotExecuted) {
  Pair pair(Options{{"error_at", "2"}, {"error_every", "5"}});
  std::vector<RailEvent> events;
  pair.post_writes(10, &events);
  events = pair.drain(*pair.writer, 10);
  EXPECT_TRUE(is_permutation_up_to(tags_of(events), 10));
  for (const RailEvent& event : events) {
    const bool fails = event.tag == 2 || event.tag % 5 == 0;
    EXPECT_EQ(event.status.code, fails ? StatusCode::kTransport : StatusCode::kOk) << event.tag;
    EXPECT_EQ(pair.memory[event.tag], fails ? 0 : 7) << event.tag;
  }
}

TEST(FaultRail, BusyRefusesOnceAndTakesTheRetry) {
  Pair pair(Options{{"busy_every", "4"}});
  std::vector<RailEvent> events;
  EXPECT_EQ(pair.post_writes(12, &events), 3u);
  while (events.size() < 12) Pair::poll(*pair.writer, &events);
  EXPECT_TRUE(is_permutation_up_to(tags_of(events), 12));
}

TEST(FaultRail, DeadPeerSwallowsAllUntilDisconnectFlushes) {
  Pair pair(Options{{"dead_peer_after", "2"}, {"delay_us", "1"}});
  EXPECT_FALSE(pair.writer->capabilities().reports_peer_loss);
  std::vector<RailEvent> events;
  pair.post_writes(5, &events);
  WorkRequest message;
  message.kind = WorkKind::kSend;
  message.peer = pair.peer.get();
  message.address = "hello";
  message.length = 5;
  message.tag = 6;
  EXPECT_EQ(pair.writer->post({&message, 1}).accepted, 1u);
  std::unique_ptr<RailPeer> back;
  ASSERT_TRUE(pair.target->connect(pair.writer->address(), kDeadline, &back).ok());
  message.peer = back.get();
  EXPECT_EQ(pair.target->post({&message, 1}).accepted, 1u);
  EXPECT_EQ(pair.drain(*pair.target, 1).size(), 1u);  // sent, as far as the target knows
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Pair::poll(*pair.writer, &events), 0u);
  EXPECT_TRUE(pair.writer->prepare_wait());
  pair.writer->cancel_wait();
  EXPECT_TRUE(pair.writer->disconnect(*pair.peer).ok());
  events = pair.drain(*pair.writer, 6);
  EXPECT_TRUE(is_permutation_up_to(tags_of(events), 6));
  for (const RailEvent& event : events) EXPECT_EQ(event.status.code, StatusCode::kPeerDead);
  EXPECT_EQ(std::count(pair.memory.begin(), pair.memory.end(), 7), 0);
}

TEST(FaultRail, HangWithoutFlushKeepsRequestsAndMemory) {
  Pair pair(Options{{"hang", "2"}, {"flush", "0"}});
  std::vector<RailEvent> events;
  pair.post_writes(2, &events);
  EXPECT_EQ(pair.writer->disconnect(*pair.peer).code, StatusCode::kUnsupported);
  events = pair.drain(*pair.writer, 1);
  for (int i = 0; i < 100; ++i) Pair::poll(*pair.writer, &events);
  EXPECT_EQ(tags_of(events), (std::vector<uint64_t>{1}));
  EXPECT_EQ(pair.writer->release_memory(pair.local, kDeadline).code, StatusCode::kDrainTimeout);
  EXPECT_NE(pair.local, nullptr);
}

TEST(FaultRail, DisconnectFlushesWhatIsHeld) {
  Pair pair(Options{{"delay_us", "60000000"}});
  std::vector<RailEvent> events;
  pair.post_writes(3, &events);
  EXPECT_TRUE(pair.writer->disconnect(*pair.peer).ok());
  events = pair.drain(*pair.writer, 3);
  EXPECT_TRUE(is_permutation_up_to(tags_of(events), 3));
  EXPECT_EQ(pair.memory[1], 0);
}

TEST(FaultRail, GoesDownWithWhatItHoldsAndComesUpAgain) {
  Pair pair(Options{{"rail_down_at", "3"}, {"rail_up_after_us", "2000"}, {"delay_us", "60000000"}});
  std::vector<RailEvent> events;
  pair.post_writes(3, &events);
  EXPECT_FALSE(pair.writer->info().up);
  const WorkRequest fourth = pair.write(4, 4, 1);
  EXPECT_EQ(pair.writer->post({&fourth, 1}).status.code, StatusCode::kRailDown);
  events = pair.drain(*pair.writer, 5);
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(events.front().kind, RailEventKind::kRailDown);
  EXPECT_EQ(events.back().kind, RailEventKind::kRailUp);
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ(events[i].status.code, StatusCode::kRailDown);
  EXPECT_TRUE(pair.writer->info().up);
  EXPECT_EQ(pair.writer->post({&fourth, 1}).accepted, 1u);
}

TEST(FaultRail, RefusesTheNthRegistration) {
  Pair pair(Options{{"refuse_register", "2"}});  // the pair itself made the first
  std::unique_ptr<LocalMemory> memory;
  std::string key;
  const Memory region{pair.source.data(), 64, kHostDevice, -1, kAccessLocal};
  EXPECT_EQ(pair.writer->register_memory(region, &memory, &key).code, StatusCode::kNoMemory);
  EXPECT_TRUE(pair.writer->register_memory(region, &memory, &key).ok());
}

TEST(FaultRail, SlowReaderTakesOneEventAtATime) {
  Pair pair(Options{{"slow_reader_us", "2000"}});
  std::vector<RailEvent> events;
  pair.post_writes(3, &events);
  const auto start = std::chrono::steady_clock::now();
  while (events.size() < 3) EXPECT_LE(Pair::poll(*pair.writer, &events), 1u);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::microseconds(4000));
}

TEST(FaultRail, LosesTheFirstMessageAndOneInN) {
  Pair pair(Options{{"harm_messages", "3"}, {"delay_us", "60000000"}});
  for (uint64_t tag = 0; tag < 60; ++tag) {
    const char payload = static_cast<char>(tag);
    WorkRequest message;
    message.kind = WorkKind::kSend;
    message.peer = pair.peer.get();
    message.address = &payload;
    message.length = 1;
    message.tag = tag + 1;
    EXPECT_EQ(pair.writer->post({&message, 1}).accepted, 1u);
  }
  EXPECT_TRUE(is_permutation_up_to(tags_of(pair.drain(*pair.writer, 60)), 60));  // the sender cannot know
  std::string arrived;
  RailEvent event;
  while (pair.target->poll({&event, 1}) == 1) arrived.append(reinterpret_cast<const char*>(event.data), event.length);
  EXPECT_EQ(arrived.find('\0'), std::string::npos);
  EXPECT_TRUE(std::is_sorted(arrived.begin(), arrived.end()));
  EXPECT_GT(arrived.size(), 20u);
  EXPECT_LT(arrived.size(), 55u);
}

TEST(FaultRail, RevokedKeysAreRefusedHoweverLateTheWrite) {
  Pair pair(Options{{"delay_us", "1000"}});
  std::vector<RailEvent> events;
  pair.post_writes(2, &events);
  std::string fresh;
  ASSERT_TRUE(pair.target->revoke_memory(*pair.exposed, kDeadline, &fresh).ok());
  events = pair.drain(*pair.writer, 2);
  while (events.size() < 2) Pair::poll(*pair.writer, &events);
  for (const RailEvent& event : events) EXPECT_EQ(event.status.code, StatusCode::kStaleKey);
  EXPECT_EQ(pair.memory[1], 0);
}

}  // namespace
}  // namespace asyncfabric
