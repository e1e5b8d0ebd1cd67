// engine_targets.cc: what engines read from each other: addresses, keys, heads of messages, slices of generations, closings of counters;
// and page numbers, which programs pass in.
#include <map>
#include <set>

#include "base/bytes.h"
#include "engine/counters/closings.h"
#include "engine/counters/generations.h"
#include "engine/ops/page_list.h"
#include "engine/wire.h"
#include "target.h"

namespace asyncfabric::fuzz {
namespace {

AddressBlob address_of(size_t rails) {
  AddressBlob blob{7, 9, {}};
  for (size_t i = 0; i < rails; ++i) blob.rails.push_back({i % 2 == 0 ? "local" : "tcp", std::string(20 + i, 'a')});
  return blob;
}

std::string key_of(size_t rails) {
  KeyBlob blob;
  blob.incarnation = 7;
  blob.region = 3;
  blob.generation = 5;
  blob.length = 1 << 20;
  blob.access = 3;
  blob.rail_keys.assign(rails, "0123456789abcdef");
  blob.address = encode_address(address_of(rails));
  return encode_key(blob);
}

// The checksum at the end, made right.
void seal_again(std::string* bytes) {
  if (bytes->size() < 8) return;
  const uint64_t sum = checksum({bytes->data(), bytes->size() - 8});
  std::memcpy(bytes->data() + bytes->size() - 8, &sum, sizeof sum);
}

// Also of the address in a key, which is its last field.
void seal_key_again(std::string* bytes) {
  const std::string& key = *bytes;
  for (size_t length = 8; length + 10 <= key.size() && length <= kMaxAddressBytes; ++length) {
    const size_t at = key.size() - 8 - length;
    uint16_t stated;
    std::memcpy(&stated, key.data() + at - 2, sizeof stated);
    if (stated != length || key.compare(at, 4, "AFA1") != 0) continue;
    std::string address = key.substr(at, length);
    seal_again(&address);
    bytes->replace(at, length, address);
    break;
  }
  seal_again(bytes);
}

void read_address(std::string_view bytes) {
  AddressBlob blob;
  if (decode_address(bytes, &blob)) require(encode_address(blob) == bytes, "an address is its own encoding");
}

void read_key(std::string_view bytes) {
  KeyBlob blob;
  if (!decode_key(bytes, &blob)) return;
  require(encode_key(blob) == bytes, "a key is its own encoding");
  require(blob.offset + blob.length >= blob.offset, "a key's range does not wrap");
}

void read_header(std::string_view bytes) {
  MessageHeader header;
  std::string_view payload;
  if (!decode_header(bytes, &header, &payload)) return;
  char again[kHeaderBytes];
  encode_header(header, again);
  require(bytes.substr(0, kHeaderBytes) == std::string_view(again, kHeaderBytes), "a head is its own encoding");
  require(payload.size() == bytes.size() - kHeaderBytes, "the payload is what follows the head");
}

std::string greeting_of(size_t rails) {
  const std::string address = encode_address(address_of(rails));
  ByteWriter writer;
  writer.put_string<uint16_t>(address);
  Generations counters;
  counters.set(3, 9, 1);
  counters.set(10, 2, 2);
  writer.put_raw(counters.slice(0, 4096));
  char head[kHeaderBytes];
  encode_header({MessageType::kHello, 7, 9, 1ull << 32, 0}, head);
  return std::string(head, kHeaderBytes) + writer.text();
}

// A slice is taken whole or not at all, and what was learned can be passed on in slices of any size.
void read_slices(std::string_view bytes) {
  ByteReader reader(bytes);
  const uint32_t from = reader.get<uint8_t>() % 4 == 0 ? reader.get<uint32_t>() : 0;
  const size_t most_bytes = 16 + reader.get<uint8_t>();
  Generations before, learned;
  for (Generations* each : {&before, &learned}) each->set(100, 200, 2);
  const std::string all_before = before.slice(0, 1 << 16);
  const uint32_t next = learned.learn(from, reader.rest());
  if (next == from) {
    require(learned.slice(0, 1 << 16) == all_before, "a refused slice changes nothing");
    return;
  }
  require(next > from && next <= Generations::kEnd, "a slice leads on");
  Generations copy;
  for (uint32_t at = 0; at != Generations::kEnd;) {
    const std::string slice = learned.slice(at, most_bytes);
    require(slice.size() <= most_bytes, "a slice keeps to its bound");
    const uint32_t then = copy.learn(at, slice);
    require(then != at, "an engine's own slice is taken");
    at = then;
  }
  require(copy.slice(0, 1 << 20) == learned.slice(0, 1 << 20), "slices carry all");
}

std::string slice_of(size_t runs) {
  Generations counters;
  for (uint32_t i = 0; i < runs; ++i) counters.set(i * 10, i * 10 + 4, 1 + i % 3);
  return std::string("\1\100", 2) + counters.slice(0, 4096);
}

// Both ends of closing counters, under calls in any order: each closing is confirmed once, each list is taken once.
void read_closings(std::string_view bytes) {
  ClosingsAsked asked;
  ClosingsTaken taken;
  uint32_t added = 0;
  std::multiset<uint32_t> open;
  std::map<uint64_t, uint32_t> holds;
  std::set<uint64_t> seen;
  for (ByteReader reader(bytes); reader.ok() && !reader.rest().empty();) {
    const uint8_t what = reader.get<uint8_t>();
    const uint64_t number = (what & 8) != 0 ? reader.get<uint64_t>() : reader.get<uint8_t>();
    switch (what % 5) {
      case 0:
        asked.add(added);
        open.insert(added++);
        break;
      case 1: asked.send_new([](uint64_t, const Closings&) {}); break;
      case 2:
        for (const uint32_t closing : asked.confirmed(number, reader.get<uint8_t>(), reader.get<uint8_t>()))
          require(open.erase(closing) == 1, "a closing is confirmed once");
        break;
      case 3:
        if (taken.take(number) == ClosingsTaken::Verdict::kNew) {
          require(seen.insert(number).second, "a list is taken once");
          holds[number] = 1;
        }
        break;
      default:
        if (const auto held = holds.find(number); held != holds.end()) {
          if (what % 2 == 0) {
            taken.hold(number);
            ++held->second;
          } else {
            const bool last = --held->second == 0;
            require(taken.release(number) == last, "the last hold ends a list");
            if (last) holds.erase(held);
          }
        }
    }
  }
}

// Page numbers of a program, with the bounds that submit_pages computes: what is accepted stays inside.
void read_pages(std::string_view bytes) {
  ByteReader reader(bytes);
  const uint64_t page_bytes = reader.get<uint32_t>(), stride = reader.get<uint64_t>(), start = reader.get<uint32_t>(),
                 length = reader.get<uint64_t>() & ((1ull << 62) - 1);
  const bool reads = reader.get<uint8_t>() % 2 != 0;
  if (page_bytes == 0 || start > length || page_bytes > length - start) return;
  std::vector<int64_t> numbers;
  while (reader.rest().size() >= 8) numbers.push_back(reader.get<int64_t>());
  if (numbers.empty()) return;
  const uint64_t last = stride == 0 ? ~0ull >> 1 : (length - start - page_bytes) / stride;
  PageRoom room;  // never opened: the list's own memory
  PageList list;
  list.make(numbers.size(), room);
  if (!list.fill(numbers.data(), numbers.data(), {start, start}, {stride, stride}, {last, last}, reads)) return;
  for (uint64_t i = 0; i < list.size(); ++i) {
    require(list[i].source <= length - page_bytes && list[i].target <= length - page_bytes, "a page lies inside");
    require(list[i].target <= list.most(), "most() is the largest offset");
  }
}

std::string pages_of(std::initializer_list<int64_t> numbers) {
  ByteWriter writer;
  writer.put(uint32_t{4096});
  writer.put(uint64_t{4096});
  writer.put(uint32_t{0});
  writer.put(uint64_t{1 << 20});
  writer.put(uint8_t{0});
  for (const int64_t number : numbers) writer.put(number);
  return writer.text();
}

using Seeds = std::vector<std::string>;

}  // namespace

std::vector<Target> engine_targets() {
  return {
      {"engine.address", read_address,
       [] { return Seeds{encode_address(address_of(1)), encode_address(address_of(4))}; }, seal_again},
      {"engine.key", read_key, [] { return Seeds{key_of(1), key_of(4)}; }, seal_key_again},
      {"engine.message", read_header, [] { return Seeds{greeting_of(1), greeting_of(3)}; }},
      {"engine.generations", read_slices, [] { return Seeds{slice_of(0), slice_of(1), slice_of(30)}; }},
      {"engine.closings", read_closings,
       [] {
         return Seeds{std::string("\0\0\0\0\1\0\2\1\0\1\3\1\4\1", 14), std::string("\3\1\3\2\11\2\0\0\0\0\0\0\0", 13)};
       }},
      {"engine.pages", read_pages, [] { return Seeds{pages_of({0}), pages_of({3, 1, 255, 7})}; }},
  };
}

}  // namespace asyncfabric::fuzz
