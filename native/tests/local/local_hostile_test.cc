// local_hostile_test.cc: many peers, leaving peers, and peers that send nonsense, on the socket and in the ring. A rail survives them and
// goes on serving the others.
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <thread>
#include <utility>

#include "impostor.h"
#include "providers/local/memory/mapping.h"
#include "providers/local/memory/regions.h"
#include "providers/local/memory/segment.h"
#include "providers/local/peers/identity.h"
#include "providers/local/peers/outgoing.h"
#include "providers/local/peers/wire.h"

namespace asyncfabric {
namespace {

using namespace local_rig;

bool hangs_up(const UniqueFd& socket) {
  pollfd look{socket.get(), POLLRDHUP, 0};
  return ::poll(&look, 1, 5000) == 1;
}

void expect_service(Endpoint& endpoint) {
  Endpoint guest;
  auto peer = guest.connect(endpoint);
  ASSERT_NE(peer, nullptr);
  const size_t before = endpoint.messages.size();
  guest.post({message(*peer, "still there?", 1)});
  EXPECT_TRUE(eventually({&endpoint}, [&] { return endpoint.messages.size() > before; }));
  EXPECT_EQ(endpoint.messages.back(), "still there?");
}

// One that never accepts costs its callers a look, and the next call goes on with what the first began.
TEST(LocalCrowd, ConnectingDoesNotWaitForTheOtherSide) {
  const std::string name = "af-test-mute-" + std::to_string(getpid());
  UniqueFd listener;
  ASSERT_TRUE(local::listen_abstract(name, &listener).ok());
  const std::string mute =
      local::encode_address({local::host_identity(), getpid(), local::process_start(getpid()), 1, name});
  Endpoint guest, hub;
  std::unique_ptr<RailPeer> peer;
  for (int i = 0; i < 20; ++i) EXPECT_EQ(guest.rail->connect(mute, 0, &peer).code, StatusCode::kBusy);
  const auto accept = [&] {
    return UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  };
  UniqueFd accepted = accept();
  EXPECT_TRUE(accepted);
  EXPECT_FALSE(accept()) << "each call opened a connection";
  Status status = StatusCode::kBusy;
  EXPECT_TRUE(eventually({&hub}, [&] {
    status = guest.rail->connect(hub.rail->address(), 0, &peer);
    return status.code != StatusCode::kBusy;
  }));
  EXPECT_TRUE(status.ok()) << "others connect meanwhile";
  accepted.reset();
  std::unique_ptr<RailPeer> none;
  EXPECT_EQ(guest.rail->connect(mute, 0, &none).code, StatusCode::kPeerUnreachable);
}

TEST(LocalCrowd, SixtyFourRailsConnectBothWays) {
  Endpoint hub;
  std::vector<std::unique_ptr<Endpoint>> guests;
  std::vector<std::unique_ptr<RailPeer>> peers;
  for (uint32_t i = 0; i < 64; ++i) {
    guests.push_back(std::make_unique<Endpoint>());
    peers.push_back(guests.back()->connect(hub));
    peers.push_back(hub.connect(*guests.back()));
  }
  for (uint32_t i = 0; i < 64; ++i) {
    guests[i]->post({signal(*peers[2 * i], i, 1)});
    hub.post({signal(*peers[2 * i + 1], i, i)});
  }
  ASSERT_TRUE(eventually({&hub}, [&] { return hub.imms.size() == 64; }));
  for (uint32_t i = 0; i < 64; ++i) {
    EXPECT_TRUE(eventually({guests[i].get()}, [&] { return guests[i]->imms == std::vector<uint32_t>{i}; }));
  }
  guests.clear();
  EXPECT_TRUE(eventually({&hub}, [&] { return hub.lost.size() == 64; }));
}

TEST(LocalCrowd, TwoHundredFiftySixConnectAtOnce) {
  constexpr int kThreads = 8;
  constexpr int kEach = 32;
  Endpoint hub;
  std::vector<std::thread> threads;
  std::atomic<int> connected{0};
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      Endpoint guest(Words{{"ring", "64"}});
      std::vector<std::unique_ptr<RailPeer>> peers;
      for (int i = 0; i < kEach; ++i) {
        peers.push_back(guest.connect(hub));
        if (peers.back() == nullptr) return;
        guest.post({signal(*peers.back(), static_cast<uint32_t>(t * kEach + i), static_cast<uint64_t>(i))});
        ++connected;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(connected, kThreads * kEach);
  EXPECT_TRUE(eventually({&hub}, [&] { return hub.imms.size() == kThreads * kEach; }))
      << "what was sent before leaving counts";
}

TEST(LocalCrowd, TheSeatsAreBoundedAndComeBack) {
  Endpoint hub;
  Endpoint guest(Words{{"ring", "8"}});
  std::vector<std::unique_ptr<RailPeer>> peers;
  for (uint32_t i = 0; i < local::kMaxConnections; ++i) {
    peers.push_back(guest.connect(hub));
    ASSERT_NE(peers.back(), nullptr) << i;
  }
  std::unique_ptr<RailPeer> surplus;
  EXPECT_EQ(guest.rail->connect(hub.rail->address(), kPatienceNs, &surplus).code, StatusCode::kPeerRejected);
  peers.resize(10);
  EXPECT_TRUE(eventually({&hub}, [&] { return guest.rail->connect(hub.rail->address(), kPatienceNs, &surplus).ok(); }));
  guest.post({signal(*surplus, 3, 1), signal(*peers[9], 4, 2)});
  EXPECT_TRUE(eventually({&hub}, [&] { return hub.imms.size() == 2; }));
}

TEST(LocalCrowd, ARailOfTheSameProcessCanComeBack) {
  Endpoint guest;
  for (int round = 0; round < 20; ++round) {
    auto hub = std::make_unique<Endpoint>();
    auto peer = guest.connect(*hub);
    guest.post({signal(*peer, 1, static_cast<uint64_t>(round))});
    ASSERT_TRUE(eventually({hub.get()}, [&] { return hub->imms.size() == 1; }));
    hub.reset();
    ASSERT_TRUE(eventually({&guest}, [&] { return guest.lost.size() == static_cast<size_t>(round) + 1; }));
    guest.post({signal(*peer, 1, 1000 + static_cast<uint64_t>(round))});
    guest.poll();
    EXPECT_EQ(guest.done[1000 + static_cast<uint64_t>(round)].code, StatusCode::kPeerDead);
  }
}

TEST(LocalCrowd, ARailTalksToItself) {
  Endpoint endpoint;
  Block block(8192);
  auto peer = endpoint.connect(endpoint);
  auto remote = attach(endpoint, *peer, block.enrol(endpoint));
  block.data()[0] = 42;
  endpoint.post(
      {with_imm(transfer(WorkKind::kWrite, *peer, *remote, block.data(), 4096, 100, 1), 6), message(*peer, "me", 2)});
  ASSERT_TRUE(eventually({&endpoint}, [&] { return endpoint.imms.size() == 1 && endpoint.messages.size() == 1; }));
  EXPECT_EQ(block.data()[4096], 42);
}

TEST(LocalHostile, WhoHasNoDescriptorLeftStatesThatToWhomItRefuses) {
  Endpoint endpoint;
  const UniqueFd socket = knock(endpoint);
  const UniqueFd later = knock(endpoint);
  ASSERT_TRUE(local::send_wire(later.get(), local::wire_message(local::WireKind::kShow), {-1, -1, -1}).ok());
  ASSERT_TRUE(hangs_up(later));  // so the first is accepted
  const UniqueFd file(memfd_create("any", MFD_CLOEXEC));
  local::WireMessage hello = local::wire_message(local::WireKind::kHello);
  hello.target_rail = where(endpoint).rail_id;
  local::WireMessage welcome;
  {
    const NoDescriptors none;
    ASSERT_TRUE(local::send_wire(socket.get(), hello, {file.get(), file.get(), file.get()}).ok());
    local::FdPack fds;
    ASSERT_TRUE(
        local::await_wire(socket.get(), local::WireKind::kWelcome, now_ns() + kPatienceNs, &welcome, &fds).ok());
  }
  EXPECT_EQ(welcome.status, static_cast<uint32_t>(StatusCode::kNoMemory));
  EXPECT_EQ(welcome.raw, static_cast<uint32_t>(EMFILE));
  EXPECT_TRUE(hangs_up(socket));
  expect_service(endpoint);
}

// Between a rail and an owner of memory: hands on the rail's questions, and the answers when it is asked to.
class SlowOwner {
 public:
  explicit SlowOwner(RailPeer& peer) : link_(*static_cast<local::PeerHandle&>(peer).link) {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    owner_ = std::exchange(link_.socket, UniqueFd(ends[0]));
    rail_ = UniqueFd(ends[1]);
  }
  ~SlowOwner() { link_.socket = std::move(owner_); }

  // All questions so far are put to the owner. Returns how many there were.
  size_t put() {
    size_t count = 0;
    local::WireMessage message;
    local::FdPack none;
    for (; local::receive_wire(rail_.get(), &message, &none).ok(); ++count) {
      EXPECT_TRUE(local::send_wire(owner_.get(), message, {-1, -1, -1}).ok());
      answers_.emplace_back();
      EXPECT_TRUE(local::await_wire(owner_.get(), local::WireKind::kShown, now_ns() + kPatienceNs,
                                    &answers_.back().message, &answers_.back().fds)
                      .ok());
    }
    return count;
  }
  void answer(size_t question, uint32_t number_more = 0) {
    Answer& answer = answers_.at(question);
    local::WireMessage message = answer.message;
    message.number += number_more;
    EXPECT_TRUE(local::send_wire(rail_.get(), message, {answer.fds[0].get(), -1, -1}).ok());
  }

 private:
  struct Answer {
    local::WireMessage message;
    local::FdPack fds;
  };

  local::Outgoing& link_;
  UniqueFd owner_, rail_;
  std::vector<Answer> answers_;
};

// Hundreds ask the owner, or its machine is busy: nobody waits behind who waits for it, and each question is asked once.
TEST(LocalHostile, AnswersMayComeLateAndInAnyOrder) {
  Endpoint owner, writer;
  auto peer = writer.connect(owner);
  std::deque<Block> blocks;
  std::vector<std::string> keys;
  for (size_t i = 0; i < 4; ++i) keys.push_back(blocks.emplace_back(4096 * (i + 1), Kind::kMemfd).enrol(owner));
  std::vector<std::unique_ptr<RemoteMemory>> remotes(4);
  const auto attached = [&](size_t i) { return writer.rail->attach(*peer, keys[i], 0, &remotes[i]).code; };
  {
    SlowOwner slow(*peer);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(attached(i), StatusCode::kBusy);
    EXPECT_EQ(slow.put(), 4u);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(attached(i), StatusCode::kBusy);
    EXPECT_EQ(slow.put(), 0u) << "asked again";
    remotes[3].reset();  // nobody waits for this one any more
    slow.answer(2, 100);
    EXPECT_EQ(attached(0), StatusCode::kBusy) << "of a question that nobody asked";
    slow.answer(3);
    slow.answer(2);
    slow.answer(1);
    slow.answer(1);
    slow.answer(0);
    EXPECT_TRUE(eventually({}, [&] { return attached(0) != StatusCode::kBusy; }));
    for (const size_t i : {1, 2}) EXPECT_EQ(attached(i), StatusCode::kOk);
  }
  for (const size_t i : {0, 1, 2})
    EXPECT_EQ(static_cast<const local::RemoteHandle&>(*remotes[i]).length, 4096 * (i + 1)) << "the answer of another";
  EXPECT_NE(attach(writer, *peer, keys[3]), nullptr);
}

TEST(LocalHostile, NonsenseOnTheSocketIsHungUpOn) {
  Endpoint endpoint;
  std::mt19937_64 random(21);
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  for (int round = 0; round < 300; ++round) {
    const UniqueFd socket = knock(endpoint);
    local::WireMessage hello = local::wire_message(local::WireKind::kHello);
    switch (round % 6) {
      case 0: {  // random bytes
        std::string bytes(1 + random() % 400, '\0');
        for (char& c : bytes) c = static_cast<char>(random());
        ASSERT_GT(send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
        break;
      }
      case 1:  // a good header, wrong rail
        hello.entries = 64;
        local::send_wire(socket.get(), hello, {pipe_ends[0], pipe_ends[0], pipe_ends[1]});
        break;
      case 2:  // the right rail, no files at all
        hello.target_rail = where(endpoint).rail_id;
        hello.entries = 64;
        local::send_wire(socket.get(), hello, {-1, -1, -1});
        break;
      case 3:  // the right rail, pipes for files
        hello.target_rail = where(endpoint).rail_id;
        hello.process_start = local::process_start(getpid());
        hello.entries = 64;
        local::send_wire(socket.get(), hello, {pipe_ends[0], pipe_ends[0], pipe_ends[1]});
        break;
      case 4: {  // a segment that can shrink under us
        hello.target_rail = where(endpoint).rail_id;
        hello.process_start = local::process_start(getpid());
        hello.entries = 64;
        const UniqueFd loose(memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        ASSERT_EQ(ftruncate(loose.get(), 64 << 20), 0);
        local::send_wire(socket.get(), hello, {loose.get(), loose.get(), pipe_ends[1]});
        break;
      }
      default:  // shows a key before the handshake
        local::send_wire(socket.get(), local::wire_message(local::WireKind::kShow), {-1, -1, -1});
    }
    ASSERT_TRUE(hangs_up(socket)) << "round " << round;
  }
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  expect_service(endpoint);
}

TEST(LocalHostile, NonsenseInTheRingHarmsNobody) {
  Endpoint endpoint;
  Block block(1 << 20);
  block.fill(0x77);
  const std::string key = block.enrol(endpoint, kAccessRemoteRead);
  local::RegionKey valid;
  ASSERT_TRUE(local::decode_key(key, &valid).ok());
  std::mt19937_64 random(22);
  size_t broken = 0;
  for (int round = 0; round < 60; ++round) {
    Impostor impostor(endpoint);
    for (uint64_t position = 0; position < 500; ++position) {
      local::EntryBody body{};
      const auto wild = [&] {
        return random() % 3 == 0 ? static_cast<uint32_t>(random()) : static_cast<uint32_t>(random() % 70'000);
      };
      body.kind = static_cast<local::EntryKind>(random() % 40 == 0 ? random() % 256 : 1 + random() % 4);
      body.count = static_cast<uint8_t>(random() % 40 == 0 ? random() : 1 + random() % 12);
      body.has_imm = static_cast<uint8_t>(random());
      body.inlined = static_cast<uint8_t>(random() % 2);
      body.length =
          body.kind == local::EntryKind::kMessage && random() % 20 != 0 ? static_cast<uint32_t>(random() % 49) : wild();
      // Half of the time with a valid key, so that only bounds and rights stand between it and the memory.
      if (body.kind == local::EntryKind::kBounceWrite || body.kind == local::EntryKind::kBounceRead)
        body.bounce = {random() % 2 ? random() : valid.word,
                       random() % 2 ? random() : random() % (2 << 20),
                       random() % 2 ? wild() : valid.slot,
                       wild(),
                       0,
                       0};
      uint64_t words[local::kEntryWords];
      std::memcpy(words, &body, sizeof body);
      local::Entry& entry = impostor.entry(position);
      for (size_t i = 0; i < local::kEntryWords; ++i) entry.words[i].store(words[i], std::memory_order_relaxed);
      entry.sequence.store(position + 1);
      endpoint.poll();
    }
    broken += hangs_up(impostor.socket) ? 1 : 0;
    endpoint.imms.clear();
    endpoint.messages.clear();
  }
  EXPECT_GT(broken, 40u) << "an unknown entry ends its connection";
  for (uint64_t i = 0; i < block.length(); ++i) ASSERT_EQ(block.data()[i], 0x77);
  expect_service(endpoint);
}

TEST(LocalHostile, TheBoardCannotBeWrittenByPeers) {
  Endpoint endpoint;
  Impostor impostor(endpoint);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, impostor.board_fd.get(), 0), MAP_FAILED)
      << "rights and generations are the owner's word";
  EXPECT_NE(ftruncate(impostor.board_fd.get(), 0), 0) << "a shrunk board would be a SIGBUS for all";
  char zero = 0;
  EXPECT_LT(pwrite(impostor.board_fd.get(), &zero, 1, 0), 0);
}

}  // namespace
}  // namespace asyncfabric
