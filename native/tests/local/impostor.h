// impostor.h: a connection to a rail that a test makes by hand, as somebody would who leaves the engine's checks out: it sends what it likes
// on the socket and writes what it likes into the shared memory.
#pragma once

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <memory>
#include <utility>

#include "local_rig.h"
#include "providers/local/memory/mapping.h"
#include "providers/local/memory/regions.h"
#include "providers/local/memory/segment.h"
#include "providers/local/peers/identity.h"
#include "providers/local/peers/wire.h"

namespace asyncfabric::local_rig {

inline local::RailAddress where(const Endpoint& endpoint) {
  local::RailAddress address;
  EXPECT_TRUE(local::decode_address(endpoint.rail->address(), &address).ok());
  return address;
}

inline UniqueFd knock(const Endpoint& endpoint) {
  UniqueFd socket;
  EXPECT_TRUE(local::connect_abstract(where(endpoint).socket, now_ns() + kPatienceNs, &socket).ok());
  return socket;
}

// A connection made by hand, so that anything can be written into its memory.
struct Impostor {
  explicit Impostor(const Endpoint& endpoint) : socket(knock(endpoint)) {
    UniqueFd segment_fd;
    UniqueFd bell_fd;
    const UniqueFd doorbell(eventfd(0, EFD_NONBLOCK));
    EXPECT_TRUE(local::Mapping::create(local::FileRole::kSegment, layout.total(), &segment, &segment_fd).ok());
    EXPECT_TRUE(local::Mapping::create(local::FileRole::kBell, 4096, &own_bell, &bell_fd).ok());
    auto* header = segment->as<local::SegmentHeader>();
    header->magic = local::kSegmentMagic;
    header->version = local::kLayoutVersion;
    header->entries = kEntries;
    local::WireMessage hello = local::wire_message(local::WireKind::kHello);
    hello.target_rail = where(endpoint).rail_id;
    hello.rail = local::random_word();
    hello.process_start = local::process_start(getpid());
    hello.entries = kEntries;
    EXPECT_TRUE(local::send_wire(socket.get(), hello, {segment_fd.get(), bell_fd.get(), doorbell.get()}).ok());
    local::FdPack fds;
    EXPECT_TRUE(
        local::await_wire(socket.get(), local::WireKind::kWelcome, now_ns() + kPatienceNs, &welcome, &fds).ok());
    EXPECT_EQ(welcome.status, 0u);
    EXPECT_TRUE(local::Mapping::open(local::FileRole::kBell, fds[1].get(), sizeof(local::Bell), &bell).ok());
    board_fd = std::move(fds[0]);
  }

  local::Entry& entry(uint64_t position) { return segment->as<local::Entry>(layout.ring())[position % kEntries]; }
  // What the owner answers who shows it this key, and the file that comes along.
  local::WireMessage show(const local::RegionKey& key, UniqueFd* file, uint32_t part = 0) {
    local::WireMessage question = local::wire_message(local::WireKind::kShow);
    question.slot = key.slot;
    question.word = key.word;
    question.part = part;
    EXPECT_TRUE(local::send_wire(socket.get(), question, {-1, -1, -1}).ok());
    local::WireMessage answer;
    local::FdPack fds;
    EXPECT_TRUE(local::await_wire(socket.get(), local::WireKind::kShown, now_ns() + kPatienceNs, &answer, &fds).ok());
    *file = std::move(fds[0]);
    return answer;
  }
  // The owner's verdict on one bounced transfer of bytes that lie at the start of the staging area.
  StatusCode bounce(Endpoint& owner, local::EntryKind kind, const local::RegionKey& key, uint64_t offset,
                    uint32_t length) {
    local::EntryBody body{};
    body.kind = kind;
    body.length = length;
    body.bounce = {key.word, offset, key.slot, 0, 0, 0};
    uint64_t words[local::kEntryWords];
    std::memcpy(words, &body, sizeof body);
    for (size_t i = 0; i < local::kEntryWords; ++i) entry(sent).words[i].store(words[i], std::memory_order_relaxed);
    entry(sent).sequence.store(sent + 1);
    ring();
    const uint64_t deadline = now_ns() + kPatienceNs;
    while (segment->as<local::SegmentHeader>()->head.load() <= sent && now_ns() < deadline) owner.poll();
    const auto* results = segment->as<std::atomic<uint32_t>>(layout.results());
    return static_cast<StatusCode>(results[sent++ % kEntries].load());
  }
  uint8_t* staging() { return segment->data() + layout.staging(); }

  void ring() { bell->as<local::Bell>()->dirty[welcome.connection / 64].fetch_or(1ull << (welcome.connection % 64)); }

  static constexpr uint32_t kEntries = 64;
  uint64_t sent = 0;
  local::SegmentLayout layout{kEntries};
  UniqueFd socket;
  UniqueFd board_fd;
  local::WireMessage welcome;
  std::shared_ptr<local::Mapping> segment;
  std::shared_ptr<local::Mapping> own_bell;
  std::shared_ptr<local::Mapping> bell;
};

}  // namespace asyncfabric::local_rig
