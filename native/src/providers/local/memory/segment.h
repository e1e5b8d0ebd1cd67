// segment.h: what two processes share: layouts of the memory files, nothing else. All words that both sides touch are
// atomics; each names its partner. A peer may be hostile: whoever reads takes a private copy and checks it before use.
//   Board    a rail's: whether it sleeps, and which registrations and keys have ended. Owner writes, peers can only map it read-only (sealed).
//            Its words are random and open nothing: whoever reads it learns no address, no length, and nothing that a key is made of.
//   Segment  one per connection, made by the connector: header, results, ring of entries, staging bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace asyncfabric::local {

constexpr uint32_t kLayoutVersion = 5;
constexpr uint32_t kMaxConnections = 1024;  // incoming connections of one rail
constexpr uint32_t kMaxRegions = 32768;     // registered regions of one rail; untouched slots cost no memory
constexpr uint32_t kMaxSendBytes = 16384;
constexpr uint64_t kMaxRequestBytes = 1ull << 20;
constexpr uint32_t kStagingBytes = 2u << 20;  // lazily backed: two requests of the largest size, for bounced transfers
constexpr uint32_t kMaxHolds = 16;            // regions of one peer that copy engines write to at a time
constexpr uint32_t kMinEntries = 8;
constexpr uint32_t kMaxEntries = 65536;
constexpr size_t kPageBytes = 4096;
constexpr size_t kLineBytes = 64;

// ---- Board

constexpr uint64_t kBoardMagic = 0x31647261'6f426661ull;

struct RegionSlot {
  std::atomic<uint64_t>
      mark;  // of the keys that are good; 0: none. Partner: Segment.active_slot of each connection (INV-3)
  std::atomic<uint64_t> life;  // of the registration, whatever was revoked; 0: it has ended
};

struct Board {
  uint64_t magic;
  uint32_t version;
  std::atomic<uint32_t> closed;  // partner: owner's destructor stores, writers load
  uint64_t probe_address;        // where the owner keeps `probe_value`: shows whether process_vm_readv reaches it
  uint64_t probe_value;
  // The number of the sleep that the owner is in, never the same twice; 0: it is awake. Partner: owner stores, whoever has news loads.
  alignas(kLineBytes) std::atomic<uint64_t> sleep;
  alignas(kLineBytes) RegionSlot slots[kMaxRegions];
};

// ---- Segment

constexpr uint64_t kSegmentMagic = 0x31746e65'6d676566ull;

struct SegmentHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t entries;
  alignas(kLineBytes) std::atomic<uint32_t> active_slot;  // writer: slot + 1 while it may touch that region, else 0
  // The same for copies that outlive a post, made by a copy engine: as many regions of one peer may be under way.
  alignas(kLineBytes) std::atomic<uint32_t> held_slots[kMaxHolds];
  alignas(kLineBytes) std::atomic<uint32_t> producer_waiting;  // partner: a full producer sets, the consumer clears it
  alignas(kLineBytes) std::atomic<uint64_t> head;  // entries consumed. Partner: consumer stores, producer loads
};

enum class EntryKind : uint8_t { kImmediates = 1, kMessage = 2, kBounceWrite = 3, kBounceRead = 4 };

constexpr uint32_t kImmsPerEntry = 12;
constexpr uint32_t kInlineBytes = 48;

struct BounceBody {
  uint64_t word;    // of the key
  uint64_t offset;  // in the region
  uint32_t slot;
  uint32_t staging;  // offset of `length` bytes in the staging area
  uint32_t imm;
  uint32_t unused;
};

// The words of one entry as both sides see them in private memory.
struct EntryBody {
  EntryKind kind;
  uint8_t count;    // kImmediates: how many
  uint8_t has_imm;  // kBounceWrite
  uint8_t inlined;  // kMessage: bytes are in `bytes`, else in staging at words[0]
  uint32_t length;
  union {
    uint32_t imms[kImmsPerEntry];
    uint8_t bytes[kInlineBytes];
    uint32_t staging;
    BounceBody bounce;
  };
};

constexpr size_t kEntryWords = sizeof(EntryBody) / sizeof(uint64_t);
static_assert(sizeof(EntryBody) == 56);

// One cache line: a spinning receiver learns of an entry and reads it with a single line transfer.
struct alignas(kLineBytes) Entry {
  std::atomic<uint64_t>
      sequence;  // position + 1 once the words are valid. Partner: producer releases, consumer acquires
  std::atomic<uint64_t> words[kEntryWords];
};

static_assert(sizeof(Entry) == kLineBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// Where the parts of a segment lie.
struct SegmentLayout {
  explicit SegmentLayout(uint32_t entry_count) : entries(entry_count) {}
  uint32_t entries;
  size_t results() const { return kPageBytes; }  // uint32_t status of each bounced entry, written by the consumer
  size_t ring() const { return results() + page_up(entries * sizeof(uint32_t)); }
  size_t staging() const { return ring() + page_up(entries * sizeof(Entry)); }
  size_t total() const { return staging() + kStagingBytes; }
  static size_t page_up(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }
};

static_assert(sizeof(SegmentHeader) <= kPageBytes);

}  // namespace asyncfabric::local
