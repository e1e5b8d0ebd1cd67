// local_rig.h: what the tests of the local provider share: a rail whose events are sorted into lists, registered memory
// of each kind, and waiting on conditions with a deadline. Tests drive post() and poll() by hand, as the engine does.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "provider/provider.h"

namespace asyncfabric {
Status open_local_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);
}

namespace asyncfabric::local_rig {

using Words = std::vector<std::pair<std::string, std::string>>;

constexpr uint64_t kPatienceNs = 10'000'000'000;  // durations, as the contract wants them

// While it lives this process can open no descriptor.
class NoDescriptors {
 public:
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit none{0, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
};

class Endpoint {
 public:
  explicit Endpoint(Words options = {}) {
    RailSpec spec;
    spec.provider = "local";
    spec.options = std::move(options);
    std::string detail;
    const Status status = open_local_rail(spec, &rail, &detail);
    if (!status.ok()) ADD_FAILURE() << status_text(status.code) << ": " << detail;
  }

  size_t poll() {
    RailEvent events[64];
    const size_t count = rail->poll(events);
    for (size_t i = 0; i < count; ++i) {
      const RailEvent& event = events[i];
      switch (event.kind) {
        case RailEventKind::kDone:
          EXPECT_FALSE(done.contains(event.tag)) << "tag " << event.tag << " was reported twice";
          done[event.tag] = event.status;
          order.push_back(event.tag);
          break;
        case RailEventKind::kImmediate:
          imms.push_back(event.imm);
          if (on_imm) on_imm(event.imm);
          break;
        case RailEventKind::kMessage:
          messages.emplace_back(reinterpret_cast<const char*>(event.data), event.length);
          break;
        case RailEventKind::kPeerLost: lost.push_back(event.peer); break;
        default: ADD_FAILURE() << "unexpected event";
      }
    }
    return count;
  }

  std::unique_ptr<RailPeer> connect(const Endpoint& other) { return connect(other.rail->address()); }
  std::unique_ptr<RailPeer> connect(const std::string& address) {
    std::unique_ptr<RailPeer> peer;
    const Status status = rail->connect(address, kPatienceNs, &peer);
    EXPECT_TRUE(status.ok()) << status_text(status.code) << " " << status.raw;
    return peer;
  }

  // Posts all, polling this endpoint and `pump` while the rail is busy.
  void post(std::vector<WorkRequest> requests, const std::function<void()>& pump = {}) {
    size_t at = 0;
    const uint64_t deadline = now_ns() + 3 * kPatienceNs;
    while (at < requests.size()) {
      const PostResult result = rail->post(std::span(requests).subspan(at));
      at += result.accepted;
      if (at == requests.size()) break;
      ASSERT_EQ(result.status.code, StatusCode::kBusy);
      ++busy;
      poll();
      if (pump) pump();
      ASSERT_LT(now_ns(), deadline) << "posting never went on";
    }
  }

  std::unique_ptr<Rail> rail;
  std::map<uint64_t, Status> done;
  std::vector<uint64_t> order;
  std::vector<uint32_t> imms;
  std::vector<std::string> messages;
  std::vector<RailPeer*> lost;
  std::function<void(uint32_t)> on_imm;
  size_t busy = 0;
};

// Would a thread that sleeps on the rail wake up?
inline bool readable(const Endpoint& endpoint) {
  pollfd look{endpoint.rail->wait_fd(), POLLIN, 0};
  return ::poll(&look, 1, 0) == 1;
}

// Polls the endpoints until the condition holds. Fails after ten seconds.
template <class Condition>
::testing::AssertionResult eventually(std::initializer_list<Endpoint*> endpoints, Condition condition) {
  const uint64_t deadline = now_ns() + kPatienceNs;
  for (;;) {
    size_t events = 0;
    for (Endpoint* endpoint : endpoints) events += endpoint->poll();
    if (condition()) return ::testing::AssertionSuccess();
    if (now_ns() > deadline) return ::testing::AssertionFailure() << "the condition never came true";
    if (events == 0) sched_yield();
  }
}

enum class Kind { kForeign, kMemfd };

// Pages with a guard pattern; registered on demand.
class Block {
 public:
  Block(uint64_t length, Kind kind = Kind::kForeign) : length_(length) {
    if (kind == Kind::kMemfd) {
      memfd_ = memfd_create("block", MFD_CLOEXEC);
      EXPECT_EQ(ftruncate(memfd_, static_cast<off_t>(length)), 0);
    }
    const int flags = kind == Kind::kMemfd ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, flags, memfd_, 0);
    EXPECT_NE(base, MAP_FAILED);
    data_ = static_cast<uint8_t*>(base);
  }
  ~Block() {
    munmap(data_, length_);
    if (memfd_ >= 0) close(memfd_);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  uint8_t* data() const { return data_; }
  uint64_t length() const { return length_; }

  void fill(uint8_t value) { std::memset(data_, value, length_); }
  void randomise(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (uint64_t i = 0; i + 8 <= length_; i += 8) {
      const uint64_t word = random();
      std::memcpy(data_ + i, &word, 8);
    }
  }

  std::string enrol(Endpoint& endpoint, uint32_t access = kAccessRemoteWrite | kAccessRemoteRead) {
    Memory wanted;
    wanted.base = data_;
    wanted.length = length_;
    wanted.memfd = memfd_;
    wanted.access = access;
    std::string key;
    const Status status = endpoint.rail->register_memory(wanted, &handle, &key);
    EXPECT_TRUE(status.ok()) << status_text(status.code);
    EXPECT_LE(key.size(), 128u);
    return key;
  }

  std::unique_ptr<LocalMemory> handle;

 private:
  uint8_t* data_;
  uint64_t length_;
  int memfd_ = -1;
};

inline std::unique_ptr<RemoteMemory> attach(Endpoint& endpoint, RailPeer& peer, const std::string& key) {
  std::unique_ptr<RemoteMemory> remote;
  const Status status = endpoint.rail->attach(peer, key, kPatienceNs, &remote);
  EXPECT_TRUE(status.ok()) << status_text(status.code);
  return remote;
}

inline WorkRequest transfer(WorkKind kind, RailPeer& peer, RemoteMemory& remote, const void* address, uint64_t offset,
                            uint64_t length, uint64_t tag) {
  WorkRequest request;
  request.kind = kind;
  request.peer = &peer;
  request.remote = &remote;
  request.address = address;
  request.remote_offset = offset;
  request.length = length;
  request.tag = tag;
  return request;
}

inline WorkRequest with_imm(WorkRequest request, uint32_t imm) {
  request.has_imm = true;
  request.imm = imm;
  return request;
}

inline WorkRequest signal(RailPeer& peer, uint32_t imm, uint64_t tag) {
  WorkRequest request;
  request.peer = &peer;
  request.tag = tag;
  return with_imm(request, imm);
}

inline WorkRequest message(RailPeer& peer, std::string_view bytes, uint64_t tag) {
  WorkRequest request;
  request.kind = WorkKind::kSend;
  request.peer = &peer;
  request.address = bytes.data();
  request.length = bytes.size();
  request.tag = tag;
  return request;
}

}  // namespace asyncfabric::local_rig
