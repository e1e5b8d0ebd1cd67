// local_transfer_test.cc: bytes, bounds and rights over each way that the local provider has of moving them, between
// two rails of one process. `foreign=cma` and `foreign=bounce` force the ways that two processes use.
#include <atomic>
#include <thread>

#include "local_rig.h"

namespace asyncfabric {
namespace {

using namespace local_rig;

struct TransferWay {
  const char* name;
  const char* foreign;
  Kind kind;
  const char* copy = "auto";
  const char* copiers = "1";
};

class LocalTransfer : public ::testing::TestWithParam<TransferWay> {
 protected:
  LocalTransfer()
      : writer_(Words{{"foreign", GetParam().foreign}, {"copy", GetParam().copy}, {"copiers", GetParam().copiers}}),
        owner_(Words{{"foreign", GetParam().foreign}}),
        source_(kBytes),
        target_(kBytes, GetParam().kind),
        key_(target_.enrol(owner_)),
        peer_(writer_.connect(owner_)),
        remote_(attach(writer_, *peer_, key_)) {}

  void write(uint64_t from, uint64_t to, uint64_t length, uint64_t tag) {
    writer_.post({transfer(WorkKind::kWrite, *peer_, *remote_, source_.data() + from, to, length, tag)});
  }

  static constexpr uint64_t kBytes = (2 << 20) + 4096;
  Endpoint writer_;
  Endpoint owner_;
  Block source_;
  Block target_;
  std::string key_;
  std::unique_ptr<RailPeer> peer_;
  std::unique_ptr<RemoteMemory> remote_;
};

TEST_P(LocalTransfer, AllSizesAndOffsetsLandExactly) {
  source_.randomise(1);
  uint64_t tag = 0;
  for (const uint64_t length : {1ul, 7ul, 63ul, 64ul, 65ul, 255ul, 256ul, 257ul, 2047ul, 2048ul, 2049ul, 4095ul, 4096ul,
                                4097ul, 8191ul, 8193ul, 65537ul, (1ul << 20) - 1, 1ul << 20}) {
    for (const uint64_t shift : {0ul, 1ul, 13ul, 64ul, 4095ul}) {
      target_.fill(0xa5);
      const uint64_t from = 100 + shift * 3;
      const uint64_t to = 64 + shift;
      write(from, to, length, ++tag);
      ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.contains(tag); }));
      ASSERT_TRUE(writer_.done[tag].ok()) << status_text(writer_.done[tag].code) << " " << writer_.done[tag].raw;
      ASSERT_EQ(std::memcmp(target_.data() + to, source_.data() + from, length), 0) << length << " at " << shift;
      for (uint64_t i = 0; i < 64; ++i) {
        ASSERT_EQ(target_.data()[to - 1 - i], 0xa5) << "before the target, length " << length;
        ASSERT_EQ(target_.data()[to + length + i], 0xa5) << "behind the target, length " << length;
      }
    }
  }
}

TEST_P(LocalTransfer, ReadsBringTheBytes) {
  target_.randomise(2);
  source_.fill(0);
  uint64_t tag = 0;
  for (const uint64_t length : {1ul, 4097ul, 1ul << 20}) {
    writer_.post({transfer(WorkKind::kRead, *peer_, *remote_, source_.data() + 5, 11, length, ++tag)});
    ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.contains(tag); }));
    ASSERT_TRUE(writer_.done[tag].ok());
    ASSERT_EQ(std::memcmp(source_.data() + 5, target_.data() + 11, length), 0);
    ASSERT_EQ(source_.data()[4], 0);
    ASSERT_EQ(source_.data()[5 + length], 0);
  }
}

TEST_P(LocalTransfer, ImmediateComesAfterItsBytes) {
  constexpr uint32_t kWrites = 400;
  constexpr uint64_t kLength = 1000;
  uint32_t arrived = 0;
  owner_.on_imm = [&](uint32_t imm) {
    ASSERT_EQ(imm, arrived++);
    const auto want = static_cast<uint8_t>(imm * 7 + 1);
    for (uint64_t i = 0; i < kLength; i += 111) ASSERT_EQ(target_.data()[imm * kLength + i], want);
  };
  std::vector<WorkRequest> batch;
  for (uint32_t i = 0; i < kWrites; ++i) {
    std::memset(source_.data() + i * kLength, static_cast<uint8_t>(i * 7 + 1), kLength);
    batch.push_back(with_imm(
        transfer(WorkKind::kWrite, *peer_, *remote_, source_.data() + i * kLength, i * kLength, kLength, i + 1), i));
  }
  writer_.post(batch, [&] { owner_.poll(); });
  ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return arrived == kWrites && writer_.done.size() == kWrites; }));
  for (uint32_t i = 0; i < kWrites; ++i) ASSERT_EQ(writer_.order[i], i + 1) << "completions of one peer come in order";
}

TEST_P(LocalTransfer, UnsignalledWritesAreSilentUntilTheyFail) {
  auto silent = transfer(WorkKind::kWrite, *peer_, *remote_, source_.data(), 0, 4096, 1);
  silent.signalled = false;
  auto outside = transfer(WorkKind::kWrite, *peer_, *remote_, source_.data(), kBytes - 10, 11, 2);
  outside.signalled = false;
  writer_.post({silent, silent, outside, transfer(WorkKind::kWrite, *peer_, *remote_, source_.data(), 0, 4096, 3)});
  ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.contains(3); }));
  EXPECT_FALSE(writer_.done.contains(1));
  EXPECT_EQ(writer_.done.at(2).code, StatusCode::kOutOfBounds);
  EXPECT_TRUE(writer_.done.at(3).ok());
}

TEST_P(LocalTransfer, BoundsAreKept) {
  target_.fill(0x11);
  source_.fill(0x22);
  write(0, kBytes, 1, 1);
  write(0, kBytes - 1, 2, 2);
  write(0, ~0ull - 4, 8, 3);
  write(0, ~0ull, 1 << 20, 4);
  write(0, 0, (1 << 20) + 1, 5);
  ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.size() == 5; }));
  for (uint64_t tag = 1; tag <= 4; ++tag) EXPECT_EQ(writer_.done[tag].code, StatusCode::kOutOfBounds) << tag;
  EXPECT_EQ(writer_.done[5].code, StatusCode::kInvalidArgument);
  for (uint64_t i = 0; i < kBytes; ++i) ASSERT_EQ(target_.data()[i], 0x11);
}

TEST_P(LocalTransfer, RightsAreKept) {
  Block read_only(4096, GetParam().kind);
  Block write_only(4096, GetParam().kind);
  read_only.fill(1);
  write_only.fill(2);
  source_.fill(3);
  auto readable = attach(writer_, *peer_, read_only.enrol(owner_, kAccessRemoteRead));
  auto writable = attach(writer_, *peer_, write_only.enrol(owner_, kAccessRemoteWrite));
  writer_.post({transfer(WorkKind::kWrite, *peer_, *readable, source_.data(), 0, 64, 1),
                transfer(WorkKind::kRead, *peer_, *writable, source_.data(), 0, 64, 2),
                transfer(WorkKind::kWrite, *peer_, *writable, source_.data(), 0, 64, 3)});
  ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.size() == 3; }));
  EXPECT_EQ(writer_.done[1].code, StatusCode::kAccessDenied);
  EXPECT_EQ(writer_.done[2].code, StatusCode::kAccessDenied);
  EXPECT_TRUE(writer_.done[3].ok());
  EXPECT_EQ(read_only.data()[0], 1);
  EXPECT_EQ(source_.data()[0], 3);
  EXPECT_EQ(write_only.data()[63], 3);
  EXPECT_EQ(write_only.data()[64], 2);
}

TEST_P(LocalTransfer, PageBatchOfRandomPagesLands) {
  constexpr uint64_t kPage = 4096;
  constexpr uint64_t kPages = 512;
  source_.randomise(3);
  target_.fill(0);
  std::vector<uint64_t> targets(kPages);
  for (uint64_t i = 0; i < kPages; ++i) targets[i] = i;
  std::shuffle(targets.begin(), targets.end(), std::mt19937_64(4));
  std::vector<WorkRequest> batch;
  for (uint64_t i = 0; i < kPages; ++i) {
    batch.push_back(
        transfer(WorkKind::kWrite, *peer_, *remote_, source_.data() + i * kPage, targets[i] * kPage, kPage, i + 1));
    batch.back().signalled = i + 1 == kPages;
  }
  batch.back() = with_imm(batch.back(), 77);
  writer_.post(batch, [&] { owner_.poll(); });
  ASSERT_TRUE(
      eventually({&writer_, &owner_}, [&] { return owner_.imms.size() == 1 && writer_.done.contains(kPages); }));
  for (uint64_t i = 0; i < kPages; ++i)
    ASSERT_EQ(std::memcmp(target_.data() + targets[i] * kPage, source_.data() + i * kPage, kPage), 0);
  EXPECT_EQ(writer_.done.size(), 1u);
}

// A rail that is ordered keeps what was written last, also where one post has both.
TEST_P(LocalTransfer, WritesToOnePlaceLandInTheirOrder) {
  constexpr uint64_t kLength = 96 << 10;
  for (uint32_t round = 0; round < 40; ++round) {
    std::vector<WorkRequest> batch;
    for (uint64_t i = 0; i < 6; ++i) {
      std::memset(source_.data() + i * kLength, static_cast<int>(1 + i + round), kLength);
      const uint64_t to = i % 3 * (kLength / 2);
      batch.push_back(
          transfer(WorkKind::kWrite, *peer_, *remote_, source_.data() + i * kLength, to, kLength, round * 6 + i + 1));
    }
    writer_.post(batch, [&] { owner_.poll(); });
    ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.size() == (round + 1) * 6; }));
    for (uint64_t at = 0; at < 2 * kLength; at += 61) {
      const uint64_t last = 3 + std::min<uint64_t>(at / (kLength / 2), 2);
      ASSERT_EQ(target_.data()[at], static_cast<uint8_t>(1 + last + round)) << "at " << at << " in round " << round;
    }
  }
}

// Writes and a read of what they wrote, in one post: the read sees them.
TEST_P(LocalTransfer, AReadSeesTheWritesBeforeIt) {
  constexpr uint64_t kLength = 300'000;
  for (uint64_t round = 1; round <= 20; ++round) {
    source_.randomise(round);
    auto* back = source_.data() + 2 * kLength;
    writer_.post({transfer(WorkKind::kWrite, *peer_, *remote_, source_.data(), 64, kLength, 2 * round),
                  transfer(WorkKind::kRead, *peer_, *remote_, back, 64, kLength, 2 * round + 1)},
                 [&] { owner_.poll(); });
    ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.contains(2 * round + 1); }));
    ASSERT_EQ(std::memcmp(source_.data(), back, kLength), 0);
  }
}

TEST_P(LocalTransfer, RevokedKeyTouchesNothing) {
  target_.fill(0x33);
  source_.fill(0x44);
  std::string fresh;
  ASSERT_TRUE(owner_.rail->revoke_memory(*target_.handle, kPatienceNs, &fresh).ok());
  EXPECT_NE(fresh, key_);
  writer_.post({with_imm(transfer(WorkKind::kWrite, *peer_, *remote_, source_.data(), 0, 4096, 1), 9),
                transfer(WorkKind::kRead, *peer_, *remote_, source_.data(), 0, 4096, 2)});
  ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.size() == 2; }));
  EXPECT_EQ(writer_.done[1].code, StatusCode::kStaleKey);
  EXPECT_EQ(writer_.done[2].code, StatusCode::kStaleKey);
  EXPECT_EQ(target_.data()[0], 0x33);
  EXPECT_EQ(source_.data()[0], 0x44);
  EXPECT_TRUE(owner_.imms.empty()) << "a refused write was counted";
  std::unique_ptr<RemoteMemory> none;
  EXPECT_EQ(writer_.rail->attach(*peer_, key_, kPatienceNs, &none).code, StatusCode::kStaleKey);

  auto again = attach(writer_, *peer_, fresh);
  writer_.post({transfer(WorkKind::kWrite, *peer_, *again, source_.data(), 0, 4096, 3)});
  ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.contains(3); }));
  EXPECT_TRUE(writer_.done[3].ok());
  EXPECT_EQ(target_.data()[4095], 0x44);

  ASSERT_TRUE(owner_.rail->release_memory(target_.handle, kPatienceNs).ok());
  EXPECT_EQ(target_.handle, nullptr);
  writer_.post({transfer(WorkKind::kWrite, *peer_, *again, source_.data(), 0, 4096, 4)});
  ASSERT_TRUE(eventually({&writer_, &owner_}, [&] { return writer_.done.contains(4); }));
  EXPECT_EQ(writer_.done[4].code, StatusCode::kStaleKey);
}

TEST_P(LocalTransfer, DisconnectReportsEverythingOnce) {
  std::vector<WorkRequest> batch;
  for (uint64_t tag = 1; tag <= 20; ++tag)
    batch.push_back(transfer(WorkKind::kWrite, *peer_, *remote_, source_.data(), 0, 50'000, tag));
  const PostResult result = writer_.rail->post(batch);
  ASSERT_GT(result.accepted, 0u);
  ASSERT_TRUE(writer_.rail->disconnect(*peer_).ok());
  while (writer_.poll() > 0) {}
  EXPECT_EQ(writer_.done.size(), result.accepted);
  writer_.post({signal(*peer_, 1, 100)});
  writer_.poll();
  EXPECT_EQ(writer_.done.at(100).code, StatusCode::kPeerDead);
  EXPECT_TRUE(writer_.lost.empty()) << "we hung up ourselves";
}

// As above, with a receiver that looks all the time, on another thread.
TEST_P(LocalTransfer, ASpinningReceiverNeverSeesAnImmediateBeforeItsBytes) {
  constexpr uint64_t kLength = 64 << 10;
  constexpr uint32_t kSlots = 16;
  constexpr uint32_t kWrites = 320;
  std::atomic<uint32_t> arrived{0};
  std::atomic<bool> intact{true};
  owner_.on_imm = [&](uint32_t imm) {
    const uint8_t* bytes = target_.data() + imm % kSlots * kLength;
    const auto want = static_cast<uint8_t>(imm);
    for (uint64_t i = 0; i < kLength; i += 512)
      if (bytes[i] != want) intact = false;
    if (bytes[kLength - 1] != want) intact = false;
    ++arrived;
  };
  std::thread receiver([&] {
    while (arrived < kWrites && intact)
      if (owner_.poll() == 0) sched_yield();
  });
  for (uint32_t i = 0; i < kWrites; ++i) {
    uint8_t* from = source_.data() + i % kSlots * kLength;
    // Also keeps the writer from overwriting a slot that is still being looked at.
    while (i >= arrived + kSlots / 2 && intact) {
      writer_.poll();
      sched_yield();
    }
    std::memset(from, static_cast<int>(i), kLength);
    writer_.post({with_imm(transfer(WorkKind::kWrite, *peer_, *remote_, from, i % kSlots * kLength, kLength, i), i)});
    if (!intact) break;
  }
  receiver.join();
  EXPECT_TRUE(intact);
}

INSTANTIATE_TEST_SUITE_P(Ways, LocalTransfer,
                         ::testing::Values(TransferWay{"direct", "auto", Kind::kForeign},
                                           TransferWay{"directPlain", "auto", Kind::kForeign, "plain"},
                                           TransferWay{"mapped", "cma", Kind::kMemfd},
                                           TransferWay{"mappedStreaming", "cma", Kind::kMemfd, "nt"},
                                           TransferWay{"mappedTogether", "cma", Kind::kMemfd, "auto", "3"},
                                           TransferWay{"kernelCopy", "cma", Kind::kForeign},
                                           TransferWay{"kernelCopyTogether", "cma", Kind::kForeign, "auto", "3"},
                                           TransferWay{"bounce", "bounce", Kind::kForeign}),
                         [](const auto& info) { return info.param.name; });

TEST(LocalOptions, UnknownOnesAreNamed) {
  for (const auto& [name, word] : Words{{"copy", "fast"},
                                        {"colour", "red"},
                                        {"ring", "100"},
                                        {"ring", "x"},
                                        {"ring", ""},
                                        {"copiers", "0"},
                                        {"copiers", "17"},
                                        {"copiers", "2x"}}) {
    RailSpec spec;
    spec.options = {{name, word}};
    std::unique_ptr<Rail> rail;
    std::string detail;
    EXPECT_EQ(open_local_rail(spec, &rail, &detail).code, StatusCode::kInvalidArgument);
    EXPECT_NE(detail.find(name + "=" + word), std::string::npos) << detail;
    EXPECT_EQ(rail, nullptr);
  }
}

TEST(LocalRegions, DeviceMemoryIsRefused) {
  Endpoint endpoint;
  Memory memory;
  memory.base = &endpoint;
  memory.length = 8;
  memory.device = 0;
  std::unique_ptr<LocalMemory> handle;
  std::string key;
  EXPECT_EQ(endpoint.rail->register_memory(memory, &handle, &key).code, StatusCode::kUnsupported);
}

}  // namespace
}  // namespace asyncfabric
