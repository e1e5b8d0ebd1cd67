// local_rights_test.cc: what the holder of a key can do who leaves the checks of its own engine out. The owner decides, by the word of the
// grant: no edit of a key makes it a wider one, a reader gets no descriptor that can be written, and a strict key reaches its range.
#include <fcntl.h>

#include <atomic>
#include <string>
#include <thread>

#include "base/pages.h"
#include "impostor.h"

namespace asyncfabric {
namespace {

using namespace local_rig;
using local::EntryKind;
using local::RegionKey;

constexpr uint64_t kBytes = 64 << 10;
constexpr int kEdits = 100'000;

RegionKey parsed(const std::string& key) {
  RegionKey out;
  EXPECT_TRUE(local::decode_key(key, &out).ok());
  return out;
}

std::string narrow(Endpoint& owner, Block& block, const KeyScope& scope) {
  std::string key;
  const Status status = owner.rail->narrow_key(*block.handle, scope, &key);
  EXPECT_TRUE(status.ok()) << status_text(status.code);
  return key;
}

// Through this descriptor, or another one of the same file, somebody maps or writes the memory.
bool writes_through(const UniqueFd& file) {
  const auto maps = [](int fd) {
    void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) munmap(at, kBytes);
    return at != MAP_FAILED;
  };
  const char zero = 0;
  if (maps(file.get()) || pwrite(file.get(), &zero, 1, 0) == 1) return true;
  const UniqueFd again(open(("/proc/self/fd/" + std::to_string(file.get())).c_str(), O_RDWR | O_CLOEXEC));
  return again && (maps(again.get()) || pwrite(again.get(), &zero, 1, 0) == 1);
}

// Pages as the engine allocates them, registered with a rail.
struct Allocated {
  Allocated(Endpoint& owner, uint32_t access) {
    EXPECT_TRUE(Pages::allocate(kBytes, &pages).ok());
    const Memory memory{pages.base(), kBytes, kHostDevice, pages.memfd(), access};
    EXPECT_TRUE(owner.rail->register_memory(memory, &handle, &key).ok());
  }
  Pages pages;
  std::unique_ptr<LocalMemory> handle;
  std::string key;
};

TEST(LocalRights, NoEditOfAReadKeyWrites) {
  Endpoint owner;
  Block exposed(kBytes, Kind::kMemfd), other(kBytes, Kind::kMemfd), dead(kBytes, Kind::kMemfd);
  for (Block* block : {&exposed, &other, &dead}) block->fill(0x5a);
  exposed.enrol(owner);
  other.enrol(owner);
  const RegionKey stale = parsed(dead.enrol(owner));
  std::string renewed;
  ASSERT_TRUE(owner.rail->revoke_memory(*dead.handle, kPatienceNs, &renewed).ok());
  const RegionKey reader = parsed(narrow(owner, exposed, {kAccessRemoteRead, 0, kBytes}));
  Impostor impostor(owner);
  std::memset(impostor.staging(), 0xee, kBytes);
  std::mt19937_64 random(31);
  int shown = 0;
  for (int round = 0; round < kEdits; ++round) {
    RegionKey key = random() % 4 == 0 ? stale : reader;
    switch (random() % 5) {
      case 0: key.slot = static_cast<uint32_t>(random() % 8); break;
      case 1: key.word = random(); break;
      case 2: key.word ^= uint64_t{1} << random() % 64; break;
      case 3: key.slot ^= 1u << random() % 32; break;
      default: break;  // as it was handed out
    }
    if (round % 8 == 0) {
      UniqueFd file;
      const local::WireMessage answer = impostor.show(key, &file, random() % 4 == 0 ? 1 : 0);
      shown += answer.status == 0 ? 1 : 0;
      ASSERT_FALSE(file) << "the memory is written by others, so its file goes to them only";
      if (answer.status == 0) { ASSERT_EQ(answer.traits & kAccessRemoteWrite, 0u); }
    } else {
      const uint64_t offset = random() % 3 == 0 ? random() : random() % (kBytes + 64);
      ASSERT_NE(impostor.bounce(owner, EntryKind::kBounceWrite, key, offset, 1 + static_cast<uint32_t>(random() % 64)),
                StatusCode::kOk);
    }
  }
  EXPECT_GT(shown, kEdits / 100) << "the key itself is good";
  for (const Block* block : {&exposed, &other, &dead})
    for (uint64_t i = 0; i < kBytes; ++i) ASSERT_EQ(block->data()[i], 0x5a) << "a write landed at " << i;
  EXPECT_EQ(impostor.bounce(owner, EntryKind::kBounceRead, reader, kBytes - 8, 8), StatusCode::kOk);
  EXPECT_EQ(impostor.staging()[0], 0x5a);
}

TEST(LocalRights, AWriteKeyReadsNothingThroughTheOwner) {
  Endpoint owner;
  Block exposed(kBytes);
  exposed.fill(0x5a);
  exposed.enrol(owner);
  const RegionKey writer = parsed(narrow(owner, exposed, {kAccessRemoteWrite, 0, kBytes}));
  Impostor impostor(owner);
  std::memset(impostor.staging(), 0, 64);
  EXPECT_EQ(impostor.bounce(owner, EntryKind::kBounceRead, writer, 0, 64), StatusCode::kAccessDenied);
  EXPECT_EQ(impostor.staging()[0], 0);
  EXPECT_EQ(impostor.bounce(owner, EntryKind::kBounceWrite, writer, 0, 64), StatusCode::kOk);
  EXPECT_EQ(exposed.data()[0], 0);
}

// A descriptor that was received can be opened again for writing by the same user, so opening it read-only would not do.
TEST(LocalRights, AReaderGetsAFileThatNobodyCanWriteOrNone) {
  Endpoint owner;
  Impostor impostor(owner);
  Allocated readable(owner, kAccessRemoteRead);
  UniqueFd file;
  EXPECT_EQ(impostor.show(parsed(readable.key), &file).status, 0u);
  ASSERT_TRUE(file) << "needs a kernel from 5.1 on";
  EXPECT_FALSE(writes_through(file));
  static_cast<uint8_t*>(readable.pages.base())[0] = 7;  // its owner goes on
  void* seen = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, file.get(), 0);
  ASSERT_NE(seen, MAP_FAILED);
  EXPECT_EQ(*static_cast<uint8_t*>(seen), 7);
  munmap(seen, kBytes);

  Allocated both(owner, kAccessRemoteRead | kAccessRemoteWrite);
  std::string reader;
  ASSERT_TRUE(owner.rail->narrow_key(*both.handle, {kAccessRemoteRead, 0, kBytes}, &reader).ok());
  EXPECT_EQ(impostor.show(parsed(reader), &file).status, 0u);
  EXPECT_FALSE(file);
  EXPECT_EQ(impostor.show(parsed(both.key), &file).status, 0u);
  EXPECT_TRUE(file) << "who may write maps it";
  EXPECT_TRUE(writes_through(file));
}

TEST(LocalRights, MemoryForLocalUseHasNoDescriptorAndNoAddress) {
  Endpoint owner;
  Impostor impostor(owner);
  Allocated own(owner, kAccessLocal);
  UniqueFd file;
  const local::WireMessage answer = impostor.show(parsed(own.key), &file);
  EXPECT_FALSE(file);
  EXPECT_EQ(answer.base, 0u);
  EXPECT_EQ(impostor.bounce(owner, EntryKind::kBounceRead, parsed(own.key), 0, 8), StatusCode::kAccessDenied);
  EXPECT_EQ(impostor.bounce(owner, EntryKind::kBounceWrite, parsed(own.key), 0, 8), StatusCode::kAccessDenied);
}

// Everybody of the same user may map the board, before it has proven anything.
TEST(LocalRights, TheBoardOpensNothing) {
  Endpoint owner;
  Impostor impostor(owner);
  std::shared_ptr<local::Mapping> mapping;
  ASSERT_TRUE(
      local::Mapping::open(local::FileRole::kBoard, impostor.board_fd.get(), sizeof(local::Board), &mapping).ok());
  Block block(kBytes, Kind::kMemfd);
  const RegionKey key = parsed(block.enrol(owner));
  const local::RegionSlot& slot = mapping->as<const local::Board>()->slots[key.slot];
  for (const uint64_t word : {slot.mark.load(), slot.life.load()}) {
    EXPECT_NE(word, 0u);
    EXPECT_NE(word, key.word);
    EXPECT_NE(word, reinterpret_cast<uint64_t>(block.data()));
    UniqueFd file;
    EXPECT_EQ(impostor.show({key.slot, word}, &file).status, static_cast<uint32_t>(StatusCode::kStaleKey));
    EXPECT_FALSE(file);
    EXPECT_EQ(impostor.bounce(owner, EntryKind::kBounceWrite, {key.slot, word}, 0, 8), StatusCode::kStaleKey);
  }
}

TEST(LocalStrict, AKeyReachesItsRangeAndEndsWithTheOthers) {
  Endpoint owner;
  Block exposed(kBytes, Kind::kMemfd);
  exposed.fill(0x5a);
  exposed.enrol(owner);
  const KeyScope scope{kAccessRemoteWrite, 4099, 77, true};
  const std::string bytes = narrow(owner, exposed, scope);
  EXPECT_EQ(bytes, narrow(owner, exposed, scope)) << "one grant for one range";
  const RegionKey strict = parsed(bytes);
  Impostor impostor(owner);
  std::memset(impostor.staging(), 0xee, kBytes);
  UniqueFd file;
  EXPECT_EQ(impostor.show(strict, &file).base, 0u);
  EXPECT_FALSE(file);
  std::mt19937_64 random(32);
  for (int round = 0; round < kEdits; ++round) {
    const uint64_t offset = random() % 4 == 0 ? random() : 4000 + random() % 300;
    const auto length = static_cast<uint32_t>(1 + random() % 300);
    const bool inside = offset >= scope.offset && offset + length <= scope.offset + scope.length && offset < kBytes;
    ASSERT_EQ(impostor.bounce(owner, EntryKind::kBounceWrite, strict, offset, length),
              inside ? StatusCode::kOk : StatusCode::kOutOfBounds)
        << offset << " " << length;
  }
  for (uint64_t i = 0; i < kBytes; ++i) {
    const bool inside = i >= scope.offset && i < scope.offset + scope.length;
    ASSERT_TRUE(exposed.data()[i] == 0x5a || (inside && exposed.data()[i] == 0xee)) << i;
  }
  std::string fresh;
  ASSERT_TRUE(owner.rail->revoke_memory(*exposed.handle, kPatienceNs, &fresh).ok());
  EXPECT_EQ(impostor.bounce(owner, EntryKind::kBounceWrite, strict, scope.offset, 8), StatusCode::kStaleKey);
  EXPECT_NE(narrow(owner, exposed, scope), bytes);
}

// The same through a rail that plays by the rules: writes, reads, immediates in their order.
TEST(LocalStrict, BytesGoThroughTheOwner) {
  Endpoint owner, writer;
  Block exposed(4 << 20, Kind::kMemfd), source(4 << 20), back(4 << 20);
  source.randomise(5);
  exposed.fill(0);
  exposed.enrol(owner);
  const KeyScope scope{kAccessRemoteWrite | kAccessRemoteRead, 123, 3 << 20, true};
  auto peer = writer.connect(owner);
  auto remote = attach(writer, *peer, narrow(owner, exposed, scope));
  ASSERT_NE(remote, nullptr);
  const uint64_t step = 1 << 20;
  for (uint64_t i = 0; i < 3; ++i)
    writer.post({with_imm(transfer(WorkKind::kWrite, *peer, *remote, source.data() + i * step, 123 + i * step, step, i),
                          static_cast<uint32_t>(i))},
                [&] { owner.poll(); });
  ASSERT_TRUE(eventually({&writer, &owner}, [&] { return owner.imms.size() == 3 && writer.done.size() == 3; }));
  EXPECT_EQ(owner.imms, (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(std::memcmp(exposed.data() + 123, source.data(), 3 * step), 0);
  EXPECT_EQ(exposed.data()[122], 0);
  EXPECT_EQ(exposed.data()[123 + 3 * step], 0);
  writer.post({transfer(WorkKind::kRead, *peer, *remote, back.data(), 123, step, 10),
               transfer(WorkKind::kWrite, *peer, *remote, source.data(), 122, 8, 11)},
              [&] { owner.poll(); });
  ASSERT_TRUE(eventually({&writer, &owner}, [&] { return writer.done.size() == 5; }));
  EXPECT_TRUE(writer.done[10].ok());
  EXPECT_EQ(std::memcmp(back.data(), source.data(), step), 0);
  EXPECT_EQ(writer.done[11].code, StatusCode::kOutOfBounds);
}

// Grants are looked up while other threads make and end them.
TEST(LocalRights, KeysAreMadeWhileOthersAreUsedAndRevoked) {
  Endpoint owner;
  Block exposed(kBytes);
  exposed.enrol(owner);
  Impostor impostor(owner);
  std::atomic<bool> over{false};
  std::thread maker([&] {
    std::string key;
    for (uint64_t i = 0; !over; ++i) {
      const Status made = owner.rail->narrow_key(*exposed.handle, {kAccessRemoteRead, i % kBytes, 1, true}, &key);
      EXPECT_TRUE(made.ok() || made.code == StatusCode::kBusy);
    }
  });
  std::thread revoker([&] {
    std::string key;
    for (int i = 0; i < 5000; ++i) EXPECT_TRUE(owner.rail->revoke_memory(*exposed.handle, kPatienceNs, &key).ok());
    over = true;
  });
  while (!over) {
    std::string key;
    if (!owner.rail->narrow_key(*exposed.handle, {kAccessRemoteRead, 0, kBytes, false}, &key).ok()) continue;
    const StatusCode code = impostor.bounce(owner, EntryKind::kBounceRead, parsed(key), 0, 64);
    EXPECT_TRUE(code == StatusCode::kOk || code == StatusCode::kStaleKey) << status_text(code);
  }
  maker.join();
  revoker.join();
}

}  // namespace
}  // namespace asyncfabric
