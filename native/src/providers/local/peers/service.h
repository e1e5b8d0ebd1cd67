// service.h: the rail's doorkeeper: a thread of its own that accepts connections, answers who shows a key and
// notices peers that hang up or die. It sleeps in epoll; no transfer passes through it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "providers/local/memory/kept.h"
#include "providers/local/memory/regions.h"
#include "providers/local/peers/connection_table.h"
#include "providers/local/peers/neighbours.h"
#include "providers/local/peers/wire.h"

namespace asyncfabric::local {

// What a rail shows to those who connect to it.
struct Reception {
  uint64_t rail_id = 0;
  std::string socket_name;
  UniqueFd board_file;
};

class Service {
 public:
  Service(const Reception& reception, std::shared_ptr<WaitSet> waits, Regions& regions, ConnectionTable& connections,
          Kept& kept)
      : reception_(reception), waits_(std::move(waits)), regions_(regions), connections_(connections), kept_(kept) {}
  ~Service() { stop(); }

  Status start(TracerPolicy policy, std::string* detail);
  void stop();  // hangs up all incoming connections and joins the thread

  Neighbours& neighbours() { return *neighbours_; }  // any thread
  void watch(const Outgoing& link);                  // [control] notify the connection table when it ends
  void look_after_kept();                            // any thread: from now on, until none is left

 private:
  struct Session {
    UniqueFd socket;                     // before the handshake
    std::shared_ptr<Incoming> incoming;  // after it, and owns the socket
    uint64_t since_ns = 0;
    int fd() const { return incoming != nullptr ? incoming->socket() : socket.get(); }
  };
  using Sessions = std::map<uint64_t, Session>;

  void run();
  void accept_all();
  void serve(uint64_t id);
  Status greet(Session& session, const WireMessage& hello, FdPack& fds);
  Status refuse(const Session& session, Status why) const;
  Status show(const Session& session, const WireMessage& ask) const;
  void end(Sessions::iterator session);
  bool end_unadmitted(uint64_t now);  // those that took too long, and the oldest of too many; true: some are left
  void bury(pid_t pid);
  bool add(int fd, uint32_t events, uint64_t tag) const;

  const Reception& reception_;
  std::shared_ptr<WaitSet> waits_;
  Regions& regions_;
  ConnectionTable& connections_;
  Kept& kept_;
  std::unique_ptr<Neighbours> neighbours_;
  UniqueFd listener_;
  UniqueFd epoll_;
  UniqueFd stop_;  // rung for both
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  // [service]
  Sessions sessions_;
  uint64_t next_session_ = 1;
};

}  // namespace asyncfabric::local
