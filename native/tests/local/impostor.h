// impostor.h: a connection to a rail that a test makes by hand, as somebody would who leaves the engine's checks out: it sends what it likes
// on the socket and writes what it likes into the shared memory.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <utility>

#include "local_rig.h"
#include "providers/local/memory/mapping.h"
#include "providers/local/memory/regions.h"
#include "providers/local/memory/segment.h"
#include "providers/local/peers/identity.h"
#include "providers/local/peers/wire.h"
#include "providers/local/transfers/doorbell.h"

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
  explicit Impostor(const Endpoint& endpoint) : Impostor(endpoint, {}) { EXPECT_EQ(welcome.status, 0u); }
  // `doorbell`: what it hands over instead of one, and learns from the welcome what the rail thinks of it.
  Impostor(const Endpoint& endpoint, const UniqueFd& doorbell) : socket(knock(endpoint)) {
    UniqueFd segment_fd;
    UniqueFd own_board_fd;
    EXPECT_TRUE(local::Doorbell::make(&bell, &their_end).ok());
    EXPECT_TRUE(local::Mapping::create(local::FileRole::kSegment, layout.total(), &segment, &segment_fd).ok());
    EXPECT_TRUE(local::Mapping::create(local::FileRole::kBoard, sizeof(local::Board), &own_board, &own_board_fd).ok());
    own_board->as<local::Board>()->magic = local::kBoardMagic;
    own_board->as<local::Board>()->version = local::kLayoutVersion;
    auto* header = segment->as<local::SegmentHeader>();
    header->magic = local::kSegmentMagic;
    header->version = local::kLayoutVersion;
    header->entries = kEntries;
    local::WireMessage hello = local::wire_message(local::WireKind::kHello);
    hello.target_rail = where(endpoint).rail_id;
    hello.rail = local::random_word();
    hello.process_start = local::process_start(getpid());
    hello.entries = kEntries;
    EXPECT_TRUE(local::send_wire(socket.get(), hello,
                                 {segment_fd.get(), own_board_fd.get(), doorbell ? doorbell.get() : their_end.get()})
                    .ok());
    local::FdPack fds;
    EXPECT_TRUE(
        local::await_wire(socket.get(), local::WireKind::kWelcome, now_ns() + kPatienceNs, &welcome, &fds).ok());
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
    const uint64_t position = publish(body);
    const uint64_t deadline = now_ns() + kPatienceNs;
    while (segment->as<local::SegmentHeader>()->head.load() <= position && now_ns() < deadline) owner.poll();
    const auto* results = segment->as<std::atomic<uint32_t>>(layout.results());
    return static_cast<StatusCode>(results[position % kEntries].load());
  }
  uint64_t publish(const local::EntryBody& body) {
    uint64_t words[local::kEntryWords];
    std::memcpy(words, &body, sizeof body);
    for (size_t i = 0; i < local::kEntryWords; ++i) entry(sent).words[i].store(words[i], std::memory_order_relaxed);
    entry(sent).sequence.store(sent + 1);
    return sent++;
  }
  static local::EntryBody message(std::string_view text) {
    local::EntryBody body{};
    body.kind = local::EntryKind::kMessage;
    body.inlined = 1;
    body.length = static_cast<uint32_t>(text.size());
    std::memcpy(body.bytes, text.data(), text.size());
    return body;
  }
  uint8_t* staging() { return segment->data() + layout.staging(); }

  static constexpr uint32_t kEntries = 64;
  uint64_t sent = 0;
  local::SegmentLayout layout{kEntries};
  UniqueFd socket;
  UniqueFd board_fd;
  local::WireMessage welcome;
  std::shared_ptr<local::Mapping> segment;
  std::shared_ptr<local::Mapping> own_board;
  UniqueFd bell;       // our end of the doorbell, as an engine has it
  UniqueFd their_end;  // and what no engine keeps: the end that the rail has too
};

}  // namespace asyncfabric::local_rig
