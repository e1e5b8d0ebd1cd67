// engine_messages_test.cc: user messages over the loopback rail: what leaves together, what a broken connection does to it, how senders
// get room, how receivers learn of what came. Each interleaving is chosen by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "engine/peers/inbox.h"
#include "engine/wire.h"
#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

struct Messages : ::testing::Test {
  explicit Messages(RailSpec rail = {"loopback", "", {}}) : pair(Pair::manual(std::move(rail))) {
    rail_a = LoopbackHub::shared().rails.begin()->second;
    rail_b = LoopbackHub::shared().rails.rbegin()->second;
    to_b = pair.connect(*pair.a, *pair.b);
    turns(4);
  }

  void send(uint32_t number, size_t length = sizeof(uint32_t)) {
    std::string bytes(length, '\0');
    std::memcpy(bytes.data(), &number, sizeof number);
    const uint64_t cookie = first_cookie + number;
    OpId op = 0;
    ASSERT_TRUE(pair.a->engine->submit_send(cookie, to_b, bytes.data(), bytes.size(), &op).ok());
  }
  void send_all(uint32_t begin, uint32_t end, size_t length = sizeof(uint32_t)) {
    for (uint32_t number = begin; number < end; ++number) send(number, length);
  }
  bool ended(uint32_t number) const { return pair.a->done.contains(first_cookie + number); }
  void expect_sent(uint32_t begin, uint32_t end, size_t length = sizeof(uint32_t)) {
    for (uint32_t number = begin; number < end; ++number) {
      ASSERT_TRUE(ended(number)) << number;
      EXPECT_TRUE(pair.a->done[first_cookie + number].status.ok()) << number;
      EXPECT_EQ(pair.a->done[first_cookie + number].bytes, length) << number;
    }
  }
  // What the program of b takes now.
  std::vector<uint32_t> take(size_t most = 1000) {
    std::vector<ReceivedMessage> messages;
    pair.b->engine->take_messages(most, &messages);
    std::vector<uint32_t> numbers;
    for (const ReceivedMessage& message : messages) {
      numbers.push_back(0);
      std::memcpy(&numbers.back(), message.payload.data(), sizeof(uint32_t));
    }
    return numbers;
  }
  static std::vector<uint32_t> range(uint32_t begin, uint32_t end) {
    std::vector<uint32_t> numbers;
    for (uint32_t number = begin; number < end; ++number) numbers.push_back(number);
    return numbers;
  }
  void turns(int count) {
    for (int i = 0; i < count; ++i) pair.turn();
  }
  static size_t count_of(const LoopbackRail& rail, MessageType type) {
    size_t count = 0;
    for (const std::string& bytes : rail.delivered()) {
      MessageHeader header;
      std::string_view payload;
      count += decode_header(bytes, &header, &payload) && header.type == type ? 1 : 0;
    }
    return count;
  }
  size_t announced() const {
    return static_cast<size_t>(std::count_if(pair.b->others.begin(), pair.b->others.end(),
                                             [](const Completion& c) { return c.kind == CompletionKind::kMessage; }));
  }

  static constexpr uint64_t first_cookie = 1000;
  Pair pair;
  LoopbackRail* rail_a = nullptr;
  LoopbackRail* rail_b = nullptr;
  PeerId to_b = 0;
};

struct MessagesOverAShortQueue : Messages {
  MessagesOverAShortQueue() : Messages({"loopback", "", {{"depth", "1"}, {"burst", "1"}}}) {}
};

TEST_F(Messages, ThoseThatWaitTogetherLeaveInOneRequest) {
  const uint64_t before = rail_a->posted();
  send_all(0, 40);
  turns(4);
  EXPECT_EQ(rail_a->posted(), before + 1);
  EXPECT_EQ(take(), range(0, 40));
  expect_sent(0, 40);
}

TEST_F(Messages, ARequestIsNoLongerThanItsRailTakes) {
  const uint64_t before = rail_a->posted();
  send_all(0, 3, kMaxMessageBytes);  // of which the rail takes one and the beginning of another
  send_all(3, 63, 500);
  turns(4);
  EXPECT_EQ(rail_a->posted(), before + 5) << "two alone, the third with 16 of the short ones, then 32 and 12 of those";
  EXPECT_EQ(take(), range(0, 63));
  expect_sent(0, 3, kMaxMessageBytes);
  expect_sent(3, 63, 500);
}

TEST_F(Messages, EachComesOnceThoughTheConnectionBreaksUnderSomeThatCame) {
  rail_a->hold(true);
  send_all(0, 10);
  pair.turn();
  send_all(10, 20);
  pair.turn();
  send_all(20, 25);
  rail_a->break_messages(2, 1);  // the first request arrives, the second is lost, and both are reported as failed
  rail_a->hold(false);
  turns(8);
  EXPECT_EQ(take(), range(0, 25));
  EXPECT_TRUE(take().empty());
  expect_sent(0, 25);
  EXPECT_EQ(pair.b->engine->statistics().messages_received, 25u);
  EXPECT_EQ(pair.a->engine->statistics().ops_completed, 25u) << "each ends once";
}

TEST_F(Messages, ALaterRequestThatArrivesBeforeALostOneWaitsForIt) {
  rail_a->hold(true);
  send_all(0, 10);
  pair.turn();
  rail_a->break_messages(1, 0);
  send_all(10, 20);
  pair.turn();
  rail_a->hold(false);
  turns(8);
  EXPECT_EQ(take(), range(0, 20));
  expect_sent(0, 20);
}

TEST_F(MessagesOverAShortQueue, ARequestThatIsRefusedIsMadeAnew) {
  rail_a->hold(true);
  send_all(0, 5);
  pair.turn();  // fills the queue
  send_all(5, 30);
  turns(3);
  EXPECT_EQ(rail_a->queued(), 1u);
  send_all(30, 60);
  rail_a->hold(false);
  turns(200);
  EXPECT_EQ(take(), range(0, 60));
  expect_sent(0, 60);
}

TEST_F(Messages, ALostPeerEndsEachOfARequestByItself) {
  rail_a->hold(true);
  send_all(0, 20);
  pair.turn();
  const uint64_t gone = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_disconnect(gone, to_b).ok());
  ASSERT_TRUE(pair.until([&] { return ended(19); }));
  for (uint32_t number = 0; number < 20; ++number) {
    ASSERT_TRUE(ended(number)) << number;
    EXPECT_FALSE(pair.a->done[first_cookie + number].status.ok()) << number;
  }
}

TEST_F(Messages, CreditsAreSentForSeveral) {
  send_all(0, 48);
  turns(4);
  for (uint32_t number = 0; number < 48; ++number) {
    EXPECT_EQ(take(1), range(number, number + 1));
    turns(2);
  }
  EXPECT_EQ(count_of(*rail_b, MessageType::kCredit), 48 / kCreditBatch);
  EXPECT_EQ(count_of(*rail_a, MessageType::kAskCredit), 0u);
}

TEST_F(Messages, ASenderThatWaitsGetsRoomForEachThatIsTaken) {
  send_all(0, 67);
  turns(8);
  EXPECT_TRUE(ended(63));
  EXPECT_FALSE(ended(64)) << "64 are untaken";
  for (uint32_t number = 0; number < 3; ++number) {
    EXPECT_EQ(take(1), range(number, number + 1));
    turns(8);
    EXPECT_TRUE(ended(64 + number)) << "it does not have to wait for a reminder";
    EXPECT_FALSE(ended(65 + number) && number < 2);
  }
}

TEST_F(Messages, ACreditThatWasLostIsSentAgain) {
  send_all(0, 65);
  turns(8);
  rail_b->break_messages(1, 0);
  EXPECT_EQ(take(5), range(0, 5));
  turns(8);
  EXPECT_FALSE(ended(64));
  EXPECT_TRUE(pair.until([&] { return ended(64); }))
      << "what the reminder reports is known is less than what was taken";
}

TEST_F(Messages, OneCompletionAnnouncesAllUntilNoneIsLeft) {
  send_all(0, 20);
  turns(4);
  send_all(20, 30);
  turns(4);
  EXPECT_EQ(announced(), 1u);
  EXPECT_EQ(take(10), range(0, 10));
  send(30);
  turns(4);
  EXPECT_EQ(announced(), 1u) << "some are left, so nobody waits";
  EXPECT_EQ(take(), range(10, 31));
  send(31);
  turns(4);
  EXPECT_EQ(announced(), 2u);
}

TEST_F(Messages, MalformedOnesAreRefusedFromWhereTheyEnd) {
  AddressBlob sender, receiver;
  ASSERT_TRUE(decode_address(pair.a->engine->address(), &sender));
  ASSERT_TRUE(decode_address(pair.b->engine->address(), &receiver));
  const auto deliver = [&](std::string payload) {
    std::string bytes(kHeaderBytes, '\0');
    encode_header({MessageType::kUser, sender.incarnation, receiver.incarnation, 0, 0}, bytes.data());
    rail_a->deliver_again(bytes + payload, *rail_b);
    turns(2);
  };
  const uint64_t before = pair.b->engine->statistics().messages_refused;
  deliver(std::string("\x01", 1));                                 // half a length
  deliver(std::string("\x05\0abc", 5));                            // longer than what is there
  deliver(std::string("\xff\xff", 2) + std::string(0xffff, 'x'));  // longer than a message may be
  EXPECT_EQ(pair.b->engine->statistics().messages_refused, before + 3);
  EXPECT_TRUE(take().empty());
  deliver(std::string("\x04\0\0\0\0\0\x09", 7));  // one that is whole, and the beginning of another
  EXPECT_EQ(take(), range(0, 1));
}

TEST(MessageSpin, ReturnsWhatComesAndEndsAtItsDeadline) {
  EngineConfig config;
  add_loopback();
  config.rails = {{"loopback", "", {}}};
  config.spin_ns = 0;  // sleep after every pass: each wake-up is a real one
  Pair pair(config);
  const PeerId to_b = pair.connect(*pair.a, *pair.b), to_a = pair.connect(*pair.b, *pair.a);
  std::vector<ReceivedMessage> taken;
  EXPECT_EQ(pair.b->engine->spin_messages(9, now_ns() + 1'000'000, &taken).code, StatusCode::kTimeout);
  OpId op;
  for (uint64_t i = 1; i <= 500; ++i) {
    taken.clear();
    ASSERT_TRUE(pair.a->engine->submit_send(i + 100, to_b, &i, sizeof i, &op).ok());
    ASSERT_TRUE(pair.b->engine->spin_messages(9, now_ns() + 5'000'000'000, &taken).ok()) << i;
    ASSERT_EQ(taken.size(), 1u);
    ASSERT_TRUE(pair.b->engine->submit_send(i + 100, to_a, &i, sizeof i, &op).ok());
    ASSERT_TRUE(pair.until([&] {
      pair.a->engine->take_messages(9, &taken);
      return taken.size() == 2;
    })) << i;
    EXPECT_EQ(taken[1].payload, taken[0].payload);
  }
}

}  // namespace
}  // namespace asyncfabric::testing
