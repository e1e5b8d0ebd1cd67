// local_targets.cc: what a rail of one host reads from another process: packets on the socket with descriptors, entries in the ring with
// their staging bytes, and, at the producer's end, how far the consumer is. The memory is real and shared; the peer is the fuzzer.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "base/bytes.h"
#include "providers/local/peers/incoming.h"
#include "providers/local/peers/wire.h"
#include "target.h"

namespace asyncfabric::fuzz {
namespace {

using namespace local;
using Seeds = std::vector<std::string>;

constexpr uint32_t kEntries = kMinEntries;
constexpr size_t kRegionBytes = 4096;

std::shared_ptr<Mapping> file(FileRole role, size_t length, UniqueFd* fd) {
  std::shared_ptr<Mapping> mapping;
  require(Mapping::create(role, length, &mapping, fd).ok(), "shared memory can be made");
  return mapping;
}

// How many descriptors are open shows in the number of the next one.
int next_descriptor() {
  const UniqueFd probe(dup(0));
  return probe.get();
}

// A rail with one region of its own memory, and a segment that the fuzzer writes.
struct Rig {
  UniqueFd segment_file;
  std::shared_ptr<Mapping> segment = file(FileRole::kSegment, SegmentLayout(kEntries).total(), &segment_file);
  UniqueFd board_file;
  std::shared_ptr<Mapping> board = file(FileRole::kBoard, sizeof(Board), &board_file);
  Regions regions{board};
  std::shared_ptr<WaitSet> waits;
  std::unique_ptr<uint8_t[]> memory = std::make_unique<uint8_t[]>(kRegionBytes);
  MessageShelf shelf;
  Copier copier{CopyMode::kPlain};
  uint64_t word = 0;

  Rig() {
    board->as<Board>()->magic = kBoardMagic;
    board->as<Board>()->version = kLayoutVersion;
    require(WaitSet::open(board, &waits).ok(), "a wait set can be made");
    uint32_t slot = 0;
    std::string key;
    RegionKey decoded;
    const Memory whole{memory.get(), kRegionBytes, kHostDevice, -1, kAccessRemoteRead | kAccessRemoteWrite, -1, 0};
    require(regions.add(whole, {}, &slot, &key).ok() && decode_key(key, &decoded).ok(), "a region can be registered");
    word = decoded.word;
  }

  std::unique_ptr<Doorbell> bell() const {
    UniqueFd ours;
    UniqueFd theirs;
    std::unique_ptr<Doorbell> made;
    require(
        Doorbell::make(&ours, &theirs).ok() && Doorbell::open(std::move(ours), board_file, getpid(), waits, &made).ok(),
        "a doorbell can be made");
    return made;
  }
};

Rig& rig() {
  static Rig one;
  return one;
}

// First byte: how many descriptors ride along; the rest is the packet.
void read_packet(std::string_view bytes) {
  (void)rig();  // holds descriptors of its own
  const int before = next_descriptor();
  {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "a socket pair can be made");
    const UniqueFd ours(ends[0]), theirs(ends[1]);
    const size_t fds = bytes.empty() ? 0 : static_cast<uint8_t>(bytes[0]) % 6;
    std::string packet(bytes.substr(bytes.empty() ? 0 : 1));
    iovec body{packet.data(), packet.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 6)] = {};
    msghdr header{};
    header.msg_iov = &body;
    header.msg_iovlen = 1;
    if (fds > 0) {
      header.msg_control = control;
      header.msg_controllen = CMSG_SPACE(sizeof(int) * fds);
      cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int) * fds);
      const std::array<int, 6> given{0, 0, 0, 0, 0, 0};
      std::memcpy(CMSG_DATA(rights), given.data(), sizeof(int) * fds);
    }
    if (sendmsg(theirs.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
    WireMessage message;
    FdPack got;
    if (receive_wire(ours.get(), &message, &got).ok()) {
      require(packet.size() == sizeof message && message.fds == fds && fds <= kMaxFds,
              "a packet is what its message states");
      for (const UniqueFd& fd : got)
        if (fd) {
          std::unique_ptr<Doorbell> bell;
          require(!Doorbell::open(UniqueFd(dup(fd.get())), fd, getpid(), rig().waits, &bell).ok(),
                  "what is no doorbell is refused");
        }
    }
  }
  require(next_descriptor() == before, "no descriptor stays open");
}

std::string packet_of(WireKind kind, char fds) {
  WireMessage message = wire_message(kind);
  message.fds = static_cast<uint32_t>(fds);
  message.entries = 64;
  return fds + std::string(reinterpret_cast<const char*>(&message), sizeof message);
}

// Entries of 56 bytes, each behind a byte that states whether its sequence number is right. Words count from the region's own.
void read_ring(std::string_view bytes) {
  Rig& here = rig();
  const SegmentLayout layout(kEntries);
  Entry* ring = here.segment->as<Entry>(layout.ring());
  for (uint32_t i = 0; i < kEntries; ++i) ring[i].sequence.store(0, std::memory_order_relaxed);
  Incoming incoming(0, 1, {UniqueFd(), here.segment, kEntries, here.bell(), nullptr});
  ByteReader reader(bytes);
  uint64_t position = 0;
  std::array<RailEvent, 5> events;
  while (!reader.rest().empty() && !incoming.broken()) {
    for (uint32_t i = 0; i < kEntries && !reader.rest().empty(); ++i) {
      const uint8_t order = reader.get<uint8_t>();
      std::array<uint64_t, kEntryWords> words{};
      for (uint64_t& word : words) word = reader.rest().empty() ? 0 : reader.get<uint64_t>();
      EntryBody body;
      std::memcpy(static_cast<void*>(&body), words.data(), sizeof body);
      if (body.kind == EntryKind::kBounceWrite || body.kind == EntryKind::kBounceRead) {
        body.bounce.word += here.word;
        std::memcpy(words.data(), static_cast<const void*>(&body), sizeof body);
      }
      Entry& entry = ring[position & (kEntries - 1)];
      for (size_t word = 0; word < kEntryWords; ++word) entry.words[word].store(words[word], std::memory_order_relaxed);
      entry.sequence.store(order < 250 ? ++position : order, std::memory_order_release);
    }
    for (size_t turns = 0; turns < 64 && incoming.has_entry(); ++turns) {
      here.shelf.clear();
      const size_t count = incoming.drain(events, here.shelf, here.regions, here.copier);
      require(count <= events.size(), "events keep to their room");
      for (size_t i = 0; i < count; ++i)
        require(events[i].kind != RailEventKind::kMessage || events[i].length <= kMaxSendBytes, "messages are bounded");
    }
  }
}

std::string entry_of(const EntryBody& body) {
  return std::string(1, '\0') + std::string(reinterpret_cast<const char*>(&body), sizeof body);
}

Seeds ring_seeds() {
  EntryBody imms{EntryKind::kImmediates, 3, 0, 0, 0, {{1, 2, 3}}};
  EntryBody inlined{EntryKind::kMessage, 0, 0, 1, 5, {{}}};
  EntryBody staged{EntryKind::kMessage, 0, 0, 0, 5000, {{}}};
  EntryBody write{EntryKind::kBounceWrite, 0, 1, 0, 100, {{}}};
  write.bounce = {0, 8, 0, 0, 4, 0};
  EntryBody read = write;
  read.kind = EntryKind::kBounceRead;
  return {entry_of(imms) + entry_of(inlined), entry_of(staged) + entry_of(write) + entry_of(read), entry_of(read)};
}

// The producer keeps to its ring and to its staging bytes, whatever the consumer reports of how far it is.
void read_consumer(std::string_view bytes) {
  Rig& here = rig();
  auto* header = here.segment->as<SegmentHeader>();
  header->head.store(0, std::memory_order_relaxed);
  RingProducer producer(here.segment, kEntries);
  struct Span {
    uint64_t position;
    uint32_t begin, length;
  };
  std::vector<Span> spans;
  uint64_t keep_from = 0;
  for (ByteReader reader(bytes); !reader.rest().empty();) {
    const uint8_t what = reader.get<uint8_t>();
    switch (what % 4) {
      case 0:
        header->head.store((what & 4) != 0 ? reader.get<uint64_t>() : producer.seen_consumed() + reader.get<uint8_t>(),
                           std::memory_order_relaxed);
        break;
      case 1: keep_from = std::max(keep_from, std::min<uint64_t>(producer.consumed(), keep_from + what / 4)); break;
      default: {
        if (!producer.has_room(1)) break;
        const uint32_t length = reader.get<uint32_t>() % (kMaxRequestBytes + 1);
        uint32_t at = 0;
        if (what % 4 == 2) {
          if (!producer.reserve(length, keep_from, &at)) break;
          require(at <= kStagingBytes && length <= kStagingBytes - at, "staging bytes lie in the area");
          const uint64_t free_below = std::min(producer.seen_consumed(), keep_from);
          std::erase_if(spans, [&](const Span& span) { return span.position < free_below; });
          for (const Span& span : spans)
            require(at + length <= span.begin || span.begin + span.length <= at, "staging bytes that are in use stay");
          spans.push_back({producer.tail(), at, length});
        }
        producer.publish(EntryBody{EntryKind::kMessage, 0, 0, 0, length, {{at}}});
        require(producer.tail() - producer.seen_consumed() <= kEntries, "no entry is overwritten");
      }
    }
  }
}

}  // namespace

std::vector<Target> local_targets() {
  return {
      {"local.packet", read_packet,
       [] {
         return Seeds{packet_of(WireKind::kHello, 3), packet_of(WireKind::kShow, 0), packet_of(WireKind::kShown, 1)};
       }},
      {"local.ring", read_ring, ring_seeds},
      {"local.consumer", read_consumer,
       [] {
         return Seeds{std::string("\2\0\1\0\0\2\0\0\1\0\0\1\5", 13),
                      std::string("\2\1\0\0\0\3\0\0\0\0\4\377\0\0\0\0\0\0\0", 19)};
       }},
  };
}

}  // namespace asyncfabric::fuzz
