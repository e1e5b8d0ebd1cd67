// engine_secret_test.cc: fabrics with a secret, and an attacker without it that has a bare rail and writes each message by hand: what it
// sends becomes no peer, no count and no message, while honest peers go on. Over shared memory and over tcp.
#include <algorithm>
#include <atomic>
#include <thread>

#include "base/bytes.h"
#include "engine/counters/counters.h"
#include "engine/wire.h"
#include "provider/provider.h"
#include "rigs/engine_pair.h"
#include "secret/proof.h"

namespace asyncfabric {
namespace {

using namespace asyncfabric::testing;

const std::string kSecret = "0123456789abcdef-honest";
const std::string kOther = "0123456789abcdef-stranger";

EngineConfig with_secret(const RailSpec& rail, std::string secret) {
  EngineConfig config = Pair::manual(rail);
  config.secret = std::move(secret);
  return config;
}

AddressBlob parts_of(const std::string& address) {
  AddressBlob blob;
  EXPECT_TRUE(decode_address(address, &blob));
  return blob;
}

// A rail without an engine.
struct Attacker {
  std::unique_ptr<Rail> rail;
  std::string protocol;
  uint64_t host = 0;
  std::vector<std::unique_ptr<RailPeer>> paths;
  std::vector<std::string> received;

  Attacker(const RailSpec& spec, const AddressBlob& like) : protocol(spec.provider), host(like.host) {
    std::string detail;
    EXPECT_TRUE(open_rail(spec, &rail, &detail).ok()) << detail;
  }
  RailPeer& reach(const AddressBlob& target) {
    EXPECT_TRUE(rail->connect(target.rails[0].address, 1'000'000'000, &paths.emplace_back()).ok());
    return *paths.back();
  }
  // An address that leads here and bears this incarnation.
  std::string address(uint64_t incarnation) const {
    return encode_address({incarnation, host, {{protocol, rail->address()}}});
  }
  void post(const WorkRequest& request) {
    const uint64_t deadline = now_ns() + 10'000'000'000;
    while (rail->post({&request, 1}).accepted == 0) {
      ASSERT_LT(now_ns(), deadline) << "the rail takes nothing";
      poll();
    }
  }
  void send(RailPeer& path, std::string_view bytes) {
    WorkRequest request;
    request.kind = WorkKind::kSend;
    request.peer = &path;
    request.address = bytes.data();
    request.length = bytes.size();
    post(request);
  }
  void count(RailPeer& path, uint32_t imm) {
    WorkRequest request;
    request.peer = &path;
    request.has_imm = true;
    request.imm = pack_imm(imm, 0, 1);
    post(request);
  }
  void poll() {
    RailEvent events[64];
    const size_t count = rail->poll(events);
    for (size_t i = 0; i < count; ++i)
      if (events[i].kind == RailEventKind::kMessage)
        received.emplace_back(reinterpret_cast<const char*>(events[i].data), events[i].length);
  }
};

std::string message(const MessageHeader& header, std::string_view payload) {
  std::string bytes(kHeaderBytes, '\0');
  encode_header(header, bytes.data());
  return bytes.append(payload);
}

// A hello as the engine makes it, of whatever secret: "" for one without.
std::string hello(const std::string& secret, const std::string& own, uint64_t sender, const AddressBlob& target) {
  const MessageHeader header{MessageType::kHello, sender, target.incarnation, 1ull << 32, 0};
  ByteWriter payload;
  payload.put_string<uint16_t>(own);
  payload.put(static_cast<uint8_t>(!secret.empty()));
  payload.put_raw(std::string(16, 'n'));
  std::string text = payload.text();
  if (!secret.empty()) secret::seal(secret, target.rails[0].address, message(header, {}), &text);
  return message(header, text);
}

MessageType type_of(const std::string& bytes) {
  MessageHeader header;
  std::string_view payload;
  return decode_header(bytes, &header, &payload) ? header.type : MessageType::kPing;
}

class Secrets : public ::testing::TestWithParam<const char*> {
 protected:
  static RailSpec rail() {
    const std::string name = GetParam();
    const size_t colon = name.find(':');
    return {name.substr(0, colon), colon == std::string::npos ? "" : name.substr(colon + 1), {}};
  }

  void SetUp() override {
    std::string detail;
    std::unique_ptr<Rail> trial;
    if (!open_rail(rail(), &trial, &detail).ok()) GTEST_SKIP() << detail;
  }

  // Both count 10 of the other, and every byte arrives.
  static void expect_traffic(Pair& pair, CounterId counter_at_b) {
    std::vector<uint8_t> from(4096), to(4096, 0xee);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7 + 1);
    const RegionId source = pair.add_region(*pair.a, from), target = pair.add_region(*pair.b, to);
    const KeyId key = pair.give_key(*pair.b, target, to.size(), *pair.a);
    const uint64_t before = pair.b->engine->counter_value(counter_at_b);
    for (int i = 0; i < 10; ++i) {
      OpId op = 0;
      const uint64_t cookie = pair.a->cookie();
      ASSERT_TRUE(pair.a->engine->submit_write(cookie, source, 0, from.size(), key, 0, 7, &op).ok());
      ASSERT_TRUE(pair.wait(*pair.a, cookie).status.ok());
    }
    ASSERT_TRUE(pair.until([&] { return pair.b->engine->counter_value(counter_at_b) >= before + 10; }));
    EXPECT_EQ(pair.b->engine->counter_value(counter_at_b), before + 10);
    EXPECT_EQ(from, to);
    pair.a->engine->close_key(key);
    for (auto [party, region] : {std::pair{pair.a.get(), source}, std::pair{pair.b.get(), target}}) {
      const uint64_t cookie = party->cookie();
      ASSERT_TRUE(party->engine->submit_release(cookie, region).ok());
      ASSERT_TRUE(pair.wait(*party, cookie).status.ok());
    }
  }

  static std::vector<std::string> messages_of(Party& party) {
    std::vector<ReceivedMessage> taken;
    party.engine->take_messages(64, &taken);
    std::vector<std::string> texts;
    for (const ReceivedMessage& each : taken) texts.push_back(each.payload);
    return texts;
  }

  static Completion try_connect(Pair& pair, Party& from, const std::string& address) {
    const uint64_t cookie = from.cookie();
    EXPECT_TRUE(from.engine->submit_connect(cookie, address).ok());
    return pair.wait(from, cookie);
  }
};

// Turns until the target has refused this many messages, with the attacker's rail driven too.
void settle(Pair& pair, Attacker& attacker, uint64_t refused) {
  EXPECT_TRUE(pair.until([&] {
    attacker.poll();
    return pair.b->engine->statistics().messages_refused >= refused;
  })) << pair.b->engine->statistics().messages_refused
      << " of " << refused;
  for (int i = 0; i < 200; ++i) pair.turn(), attacker.poll();
}

TEST_P(Secrets, PeersWithTheSameOneMeetAndCount) {
  Pair pair(with_secret(rail(), kSecret));
  const CounterId counter = pair.open_counter(*pair.b, 7);
  pair.connect(*pair.a, *pair.b);
  expect_traffic(pair, counter);
  EXPECT_EQ(pair.a->engine->rails().at(0).admission, "secret");
  EXPECT_EQ(pair.b->engine->statistics().messages_refused, 0u);
}

TEST_P(Secrets, BothSidesMayConnectAtOnce) {
  Pair pair(with_secret(rail(), kSecret));
  const CounterId counter = pair.open_counter(*pair.b, 7);
  const uint64_t one = pair.a->cookie(), other = pair.b->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(one, pair.b->engine->address()).ok());
  ASSERT_TRUE(pair.b->engine->submit_connect(other, pair.a->engine->address()).ok());
  EXPECT_TRUE(pair.wait(*pair.a, one).status.ok());
  EXPECT_TRUE(pair.wait(*pair.b, other).status.ok());
  expect_traffic(pair, counter);
}

TEST_P(Secrets, AFabricMayConnectToItself) {
  Pair pair(with_secret(rail(), kSecret));
  pair.connect(*pair.a, *pair.a);
}

TEST_P(Secrets, OthersGetAnErrorAtOnceAndNoEntry) {
  const std::pair<std::string, std::string> cases[] = {{kSecret, kOther}, {kSecret, ""}, {"", kSecret}};
  for (const auto& [ours, theirs] : cases) {
    Pair pair(with_secret(rail(), ours));
    Pair others(with_secret(rail(), theirs));
    pair.b = std::move(others.b);
    const uint64_t began = now_ns();
    const Completion done = try_connect(pair, *pair.a, pair.b->engine->address());
    EXPECT_EQ(done.status.code, StatusCode::kSecretRefused);
    EXPECT_LT(now_ns() - began, pair.config.connect_deadline_ns / 2);
    EXPECT_TRUE(pair.b->engine->peers().empty());
    const std::string why = pair.a->engine->last_error();
    EXPECT_NE(why.find("secret"), std::string::npos) << why;
    EXPECT_EQ(why.find("0123456789abcdef"), std::string::npos) << why;
  }
}

// It costs a connection of ours each, so whoever wants many entries has to open many.
TEST_P(Secrets, AConnectionHasOneHelloThatIsNotFinished) {
  Pair pair(with_secret(rail(), kSecret));
  const AddressBlob target = parts_of(pair.b->engine->address());
  Attacker attacker(rail(), target);
  RailPeer& path = attacker.reach(target);
  const auto send = [&](RailPeer& over, uint64_t sender) {
    attacker.send(over, hello(kSecret, attacker.address(sender), sender, target));
  };
  const auto challenged = [&](uint64_t sender) {
    attacker.poll();
    return std::any_of(attacker.received.begin(), attacker.received.end(), [&](const std::string& bytes) {
      MessageHeader header;
      std::string_view payload;
      return decode_header(bytes, &header, &payload) && header.type == MessageType::kChallenge &&
             header.target == sender;
    });
  };
  send(path, 1001);
  EXPECT_TRUE(pair.until([&] { return challenged(1001); }));
  for (uint64_t sender = 1002; sender < 1010; ++sender) send(path, sender);
  settle(pair, attacker, 8);
  EXPECT_FALSE(challenged(1002));
  send(attacker.reach(target), 1010);
  EXPECT_TRUE(pair.until([&] { return challenged(1010); }));
  EXPECT_TRUE(pair.b->engine->peers().empty()) << "who has only sent hello is no peer";
  pair.connect(*pair.a, *pair.b);
  EXPECT_EQ(pair.b->engine->peers().size(), 1u);
}

TEST_P(Secrets, WithoutAHelloNothingIsServed) {
  Pair pair(with_secret(rail(), kSecret));
  const CounterId counter = pair.open_counter(*pair.b, 7);
  pair.connect(*pair.a, *pair.b);
  const AddressBlob target = parts_of(pair.b->engine->address()), honest = parts_of(pair.a->engine->address());
  Attacker attacker(rail(), target);
  RailPeer& path = attacker.reach(target);
  ByteWriter text;
  text.put_string<uint16_t>("forged");
  for (int i = 0; i < 20; ++i) {
    attacker.count(path, 7);
    attacker.send(path, message({MessageType::kUser, honest.incarnation, target.incarnation, 0, 0}, text.text()));
    attacker.send(path, message({MessageType::kBye, honest.incarnation, target.incarnation, 0, 0}, {}));
  }
  settle(pair, attacker, 40);
  EXPECT_EQ(pair.b->engine->counter_value(counter), 0u);
  EXPECT_EQ(pair.b->engine->statistics().immediates_received, 0u);
  EXPECT_TRUE(messages_of(*pair.b).empty());
  EXPECT_EQ(pair.b->engine->peers().size(), 1u);
  expect_traffic(pair, counter);
}

TEST_P(Secrets, AWrongCodeAdmitsNothing) {
  Pair pair(with_secret(rail(), kSecret));
  const CounterId counter = pair.open_counter(*pair.b, 7);
  pair.connect(*pair.a, *pair.b);
  const AddressBlob target = parts_of(pair.b->engine->address());
  Attacker attacker(rail(), target);
  RailPeer& path = attacker.reach(target);
  uint64_t sent = 0;
  for (const std::string& secret : {kOther, std::string()}) {
    attacker.send(path, hello(secret, attacker.address(99), 99, target)), ++sent;
    attacker.count(path, 7);
  }
  std::string damaged = hello(kSecret, attacker.address(99), 99, target);
  damaged.back() = static_cast<char>(damaged.back() ^ 1);
  attacker.send(path, damaged), ++sent;
  settle(pair, attacker, sent);
  EXPECT_EQ(pair.b->engine->peers().size(), 1u);
  EXPECT_EQ(pair.b->engine->counter_value(counter), 0u);
  expect_traffic(pair, counter);
}

// An address that leads to the attacker makes an honest peer send hello and, led on, prove itself there: passed on, it opens nothing.
TEST_P(Secrets, WhatIsProvenToAnotherAddressIsWorthNothing) {
  Pair pair(with_secret(rail(), kSecret));
  const CounterId counter = pair.open_counter(*pair.b, 7);
  const AddressBlob target = parts_of(pair.b->engine->address());
  Attacker attacker(rail(), target);
  const uint64_t cookie = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(cookie, attacker.address(target.incarnation)).ok());
  ASSERT_TRUE(pair.until([&] {
    attacker.poll();
    return !attacker.received.empty();
  }));
  RailPeer& path = attacker.reach(target);
  size_t passed = 0;
  for (int i = 0; i < 3000; ++i) {
    for (; passed < attacker.received.size(); ++passed) attacker.send(path, attacker.received[passed]);
    attacker.poll();
    pair.turn();
  }
  for (int i = 0; i < 10; ++i) attacker.count(path, 7);
  settle(pair, attacker, 1);
  EXPECT_EQ(pair.b->engine->counter_value(counter), 0u);
  EXPECT_TRUE(pair.b->engine->peers().empty()) << "a relayed hello made a peer";
  for (const std::string& each : attacker.received) EXPECT_EQ(type_of(each), MessageType::kHello);
}

// Turned round to its sender, or repeated over another connection.
TEST_P(Secrets, AReflectedOrRepeatedHelloAdmitsNothing) {
  Pair pair(with_secret(rail(), kSecret));
  const CounterId counter = pair.open_counter(*pair.a, 7);
  const AddressBlob a = parts_of(pair.a->engine->address());
  Attacker attacker(rail(), a);
  const uint64_t cookie = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(cookie, attacker.address(4711)).ok());
  ASSERT_TRUE(pair.until([&] {
    attacker.poll();
    return !attacker.received.empty();
  }));
  RailPeer& path = attacker.reach(a);
  for (const std::string& each : attacker.received) attacker.send(path, each);
  for (int i = 0; i < 10; ++i) attacker.count(path, 7);
  for (int i = 0; i < 500; ++i) pair.turn(), attacker.poll();
  EXPECT_EQ(pair.a->engine->counter_value(counter), 0u);
  EXPECT_GE(pair.a->engine->statistics().messages_refused, 1u);
}

// A hello of the right code, sent by somebody who kept it: the answer goes to the honest address in it, and its connection brings nothing.
TEST_P(Secrets, AKeptHelloAdmitsNoConnection) {
  Pair pair(with_secret(rail(), kSecret));
  const CounterId counter = pair.open_counter(*pair.b, 7);
  const AddressBlob target = parts_of(pair.b->engine->address()), honest = parts_of(pair.a->engine->address());
  Attacker attacker(rail(), target);
  RailPeer& path = attacker.reach(target);
  attacker.send(path, hello(kSecret, pair.a->engine->address(), honest.incarnation, target));
  for (int i = 0; i < 500; ++i) pair.turn(), attacker.poll();
  ByteWriter text;
  text.put_string<uint16_t>("forged");
  for (int i = 0; i < 10; ++i) {
    attacker.count(path, 7);
    attacker.send(path, message({MessageType::kUser, honest.incarnation, target.incarnation, 0, 0}, text.text()));
  }
  settle(pair, attacker, 10);
  EXPECT_EQ(pair.b->engine->counter_value(counter), 0u);
  EXPECT_TRUE(messages_of(*pair.b).empty());
}

constexpr uint64_t kHelloGapNs = 83'000;

// 3,000 hellos of as many made-up peers within 0.25 s: no entry is left, and registering memory goes on at its speed.
TEST_P(Secrets, AFloodLeavesNoEntries) {
  EngineConfig config = with_secret(rail(), kSecret);
  config.polling = PollingMode::kAdaptive;
  Pair pair(config);
  const CounterId counter = pair.open_counter(*pair.b, 7);
  pair.connect(*pair.a, *pair.b);
  const AddressBlob target = parts_of(pair.b->engine->address());
  std::vector<uint8_t> bytes(1 << 16);
  const auto median_register = [&](auto&& goes_on) {
    std::vector<uint64_t> took;
    do {
      const uint64_t began = now_ns();
      const RegionId region = pair.add_region(*pair.b, bytes);
      took.push_back(now_ns() - began);
      const uint64_t cookie = pair.b->cookie();
      EXPECT_TRUE(pair.b->engine->submit_release(cookie, region).ok());
      EXPECT_TRUE(pair.wait(*pair.b, cookie).status.ok());
    } while (took.size() < 301 || goes_on());
    const auto middle = took.begin() + static_cast<ptrdiff_t>(took.size() / 2);
    std::nth_element(took.begin(), middle, took.end());
    return *middle;
  };
  const uint64_t quiet = median_register([] { return false; });
  Attacker attacker(rail(), target);
  RailPeer& path = attacker.reach(target);
  std::atomic<bool> sends{true};
  uint64_t lasted = 0;
  std::thread flood([&] {
    const uint64_t began = now_ns();
    for (uint64_t i = 0; i < 3000; ++i) {
      attacker.send(path, hello(i % 2 == 0 ? kOther : "", attacker.address(1000 + i), 1000 + i, target));
      while (now_ns() < began + i * kHelloGapNs) attacker.poll();
    }
    lasted = now_ns() - began;
    sends = false;
  });
  const uint64_t flooded = median_register([&] { return sends.load(); });
  flood.join();
  settle(pair, attacker, 3000);
  std::printf("register: quiet %.1f us, flooded %.1f us; 3,000 hellos took %.3f s\n", static_cast<double>(quiet) / 1e3,
              static_cast<double>(flooded) / 1e3, static_cast<double>(lasted) / 1e9);
  EXPECT_LT(flooded, 5 * quiet + 100'000) << "the figure is 1.5; more is left to a busy machine";
  EXPECT_EQ(pair.b->engine->peers().size(), 1u);
  expect_traffic(pair, counter);
}

INSTANTIATE_TEST_SUITE_P(Rails, Secrets, ::testing::Values("local", "tcp:lo"), [](const auto& info) {
  return std::string(info.param).substr(0, std::string(info.param).find(':'));
});

// Without a secret too, a connection belongs to the peer that spoke over it first.
TEST(Identity, AMessageIsFromWhomItsConnectionBelongsTo) {
  for (const RailSpec& rail : {RailSpec{"local", "", {}}, RailSpec{"tcp", "lo", {}}}) {
    std::string detail;
    std::unique_ptr<Rail> trial;
    if (!open_rail(rail, &trial, &detail).ok()) continue;
    Pair pair(with_secret(rail, ""));
    pair.connect(*pair.b, *pair.a);
    const AddressBlob target = parts_of(pair.b->engine->address()), honest = parts_of(pair.a->engine->address());
    Attacker attacker(rail, target);
    RailPeer& path = attacker.reach(target);
    attacker.send(path, hello("", attacker.address(99), 99, target));
    ASSERT_TRUE(pair.until([&] { return attacker.poll(), pair.b->engine->peers().size() == 2; }));
    const uint64_t refused = pair.b->engine->statistics().messages_refused;
    ByteWriter text;
    text.put_string<uint16_t>("forged");
    attacker.send(path, message({MessageType::kUser, honest.incarnation, target.incarnation, 0, 0}, text.text()));
    attacker.send(path, message({MessageType::kBye, honest.incarnation, target.incarnation, 0, 0}, {}));
    settle(pair, attacker, refused + 2);
    std::vector<ReceivedMessage> taken;
    pair.b->engine->take_messages(64, &taken);
    EXPECT_TRUE(taken.empty());
    EXPECT_EQ(pair.b->engine->peers().front().incarnation, honest.incarnation);
    EXPECT_EQ(pair.b->engine->peers().front().state, 1u) << "a forged goodbye ended it";
  }
}

}  // namespace
}  // namespace asyncfabric
