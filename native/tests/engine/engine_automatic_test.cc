// engine_automatic_test.cc: rails that were chosen by the machine: those that do not open are left out with their reason, and memory that
// some of them cannot carry is registered with the others, and its owner and whoever cannot use it get the reason.
#include <gtest/gtest.h>

#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

using Options = std::vector<std::pair<std::string, std::string>>;

RailSpec chosen(Options options = {}, const std::string& device = "") {
  RailSpec spec{"loopback", device, std::move(options)};
  spec.optional = true;
  spec.reason = "for the test";
  return spec;
}

EngineConfig automatic(std::vector<RailSpec> rails) {
  EngineConfig config;
  config.rails = std::move(rails);
  config.automatic = true;
  config.polling = PollingMode::kManual;
  config.drain_deadline_ns = 200'000'000;
  config.stripe_bytes = 64;
  return config;
}

TEST(Automatic, ARailThatDoesNotOpenIsLeftOutWithItsReason) {
  add_loopback();
  Party party(automatic({chosen({{"opens", "0"}}, "x0"), chosen({}, "x1")}));
  ASSERT_NE(party.engine, nullptr);
  ASSERT_EQ(party.engine->rails().size(), 1u);
  EXPECT_EQ(party.engine->rails()[0].device, "x1");
  EXPECT_EQ(party.engine->rails()[0].reason, "for the test");
  ASSERT_EQ(party.engine->rails_left_out().size(), 1u);
  EXPECT_EQ(party.engine->rails_left_out()[0].rail, "loopback:x0");
  EXPECT_EQ(party.engine->rails_left_out()[0].reason, "it is broken");
}

TEST(Automatic, WhereNoneOpensTheErrorListsAllReasons) {
  add_loopback();
  std::unique_ptr<Engine> engine;
  std::string detail;
  const auto config = automatic({chosen({{"opens", "0"}}, "x0"), chosen({{"opens", "0"}}, "x1")});
  EXPECT_EQ(Engine::open(config, &engine, &detail).code, StatusCode::kNoProvider);
  EXPECT_NE(detail.find("loopback:x0: it is broken"), std::string::npos) << detail;
  EXPECT_NE(detail.find("loopback:x1: it is broken"), std::string::npos) << detail;
}

TEST(Automatic, ARailThatWasNamedHasToOpen) {
  add_loopback();
  std::unique_ptr<Engine> engine;
  std::string detail;
  RailSpec named = chosen({{"opens", "0"}});
  named.optional = false;
  EXPECT_EQ(Engine::open(automatic({chosen(), named}), &engine, &detail).code, StatusCode::kNoProvider);
  EXPECT_EQ(detail, "it is broken");
}

TEST(Automatic, MemoryGoesOverTheRailsThatTookIt) {
  const RailSpec takes = chosen(), refuses = chosen({{"takes", "0"}});
  Pair pair(automatic({refuses, takes}));
  pair.connect(*pair.a, *pair.b);
  std::vector<uint8_t> source(4096), target(4096);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 7 + 1);
  const RegionId from = pair.add_region(*pair.a, source), to = pair.add_region(*pair.b, target);
  RegionInfo info;
  ASSERT_TRUE(pair.b->engine->region_info(to, &info).ok());
  EXPECT_NE(info.refused.find("rail 0 (loopback)"), std::string::npos) << info.refused;
  const KeyId key = pair.give_key(*pair.b, to, target.size(), *pair.a);
  OpId op = 0;
  for (int round = 0; round < 3; ++round) {  // lanes take turns
    std::fill(target.begin(), target.end(), uint8_t{0});
    const uint64_t cookie = pair.a->cookie();
    ASSERT_TRUE(pair.a->engine->submit_write(cookie, from, 0, source.size(), key, 0, kNoImm, &op, 0).ok());
    ASSERT_TRUE(pair.wait(*pair.a, cookie).status.ok());
    EXPECT_EQ(pair.a->done[cookie].rails, 2u);
    EXPECT_EQ(source, target);
  }
  const uint64_t revoked = pair.b->cookie(), released = pair.b->cookie();
  ASSERT_TRUE(pair.b->engine->submit_revoke(revoked, to).ok());
  EXPECT_TRUE(pair.wait(*pair.b, revoked).status.ok());
  ASSERT_TRUE(pair.b->engine->submit_release(released, to).ok());
  EXPECT_TRUE(pair.wait(*pair.b, released).status.ok());
}

TEST(Automatic, MemoryThatNoCommonRailTookIsRefusedWithTheReason) {
  add_loopback();
  const RailSpec local{"local", "", {}}, takes = chosen(), refuses = chosen({{"takes", "0"}});
  for (const bool ours : {true, false}) {  // the memory of the writer, or of the target
    Pair pair(automatic({takes}));
    pair.a = std::make_unique<Party>(automatic(ours ? std::vector{refuses, takes} : std::vector{takes}));
    pair.b = std::make_unique<Party>(automatic(ours ? std::vector{takes} : std::vector{refuses, local}));
    std::vector<uint8_t> source(256, 1), target(256, 0);
    const RegionId from = pair.add_region(*pair.a, source), to = pair.add_region(*pair.b, target);
    const KeyId key = pair.give_key(*pair.b, to, target.size(), *pair.a);
    pair.connect(*pair.a, *pair.b);
    const uint64_t cookie = pair.a->cookie();
    OpId op = 0;
    ASSERT_TRUE(pair.a->engine->submit_write(cookie, from, 0, 256, key, 0, kNoImm, &op, 0).ok());
    if (ours) {  // the other lane carries it
      EXPECT_TRUE(pair.wait(*pair.a, cookie).status.ok());
      EXPECT_EQ(source, target);
      continue;
    }
    EXPECT_EQ(pair.wait(*pair.a, cookie).status.code, StatusCode::kUnsupported);
    EXPECT_NE(pair.a->engine->reason(cookie).find("not registered with a loopback rail"), std::string::npos)
        << pair.a->engine->reason(cookie);
  }
}

TEST(Automatic, MemoryThatNoRailTookIsNoRegion) {
  Pair pair(automatic({chosen({{"takes", "0"}})}));
  std::vector<uint8_t> bytes(256);
  const uint64_t cookie = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_register(cookie, bytes.data(), bytes.size(), kHostDevice, 3).ok());
  EXPECT_EQ(pair.wait(*pair.a, cookie).status.code, StatusCode::kNoMemory);
}

TEST(Automatic, RailsThatWereNamedAllHaveToTakeIt) {
  EngineConfig config = automatic({chosen({{"takes", "0"}}), chosen()});
  config.automatic = false;
  Pair pair(config);
  std::vector<uint8_t> bytes(256);
  const uint64_t cookie = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_register(cookie, bytes.data(), bytes.size(), kHostDevice, 3).ok());
  EXPECT_EQ(pair.wait(*pair.a, cookie).status.code, StatusCode::kNoMemory);
}

}  // namespace
}  // namespace asyncfabric::testing
