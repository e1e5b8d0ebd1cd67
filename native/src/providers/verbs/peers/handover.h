// handover.h: the two letter boxes between the lock's holder and a rail's service thread: jobs go there, news come back. Each has a lock that is
// held for a push or a swap, and an eventfd that wakes the other side. Nothing of the data path passes here.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/unique_fd.h"
#include "providers/verbs/peers/queue_pair.h"

namespace asyncfabric::verbs {

struct Connection;
struct KeyNumber;
struct Queues;
struct ReceiveBlock;

enum class JobKind : uint8_t {
  kConnect,    // build both lanes
  kRebuild,    // `lanes` broke and are empty; `old` are their queue pairs
  kClose,      // the connection is over: send goodbye
  kForgotten,  // the lock's holder is done with the incoming queue pair `qpn`
  kShutOut,    // the incoming connection `id` brings nothing any more
  kWreck,      // `queues` are the last that the lock's holder has in a device that failed
  kAskKey,     // which number has `key` in the present life of the peer's device?
};

struct Job {
  JobKind kind = JobKind::kConnect;
  std::shared_ptr<Connection> connection;
  uint8_t lanes = 0;
  QueuePair old;
  std::shared_ptr<Queues> queues;
  std::shared_ptr<KeyNumber> key;
  uint64_t id = 0;  // of the connection
  uint32_t qpn = 0;
};

enum class NewsKind : uint8_t {
  kReady,         // `pairs` of `lanes` of `connection` carry
  kGivenUp,       // `connection` could not be made, or its peer is gone: `status`
  kIncoming,      // `qp` receives what a peer sends over its connection `id`, and takes our credits back to it
  kIncomingGone,  // `qpn` does not any more: answer with kForgotten
  kReceives,      // `block`: more room for messages
  kReceivesLow,   // the device reports that receives run out
  kAbandoned,     // the engine dropped the handle of `connection`
  kPortDown,      // `status`
  kPortUp,
  kDeviceFailed,  // `status`; answer with kWreck
  kDeviceOpen,    // again: `queues`, and the rail's address there
  kPeerMoved,     // the peer's device was opened again: `connection` is to be built anew
};

struct News {
  NewsKind kind = NewsKind::kReady;
  std::shared_ptr<Connection> connection;
  uint8_t lanes = 0;
  std::array<QueuePair, kLanes> pairs;
  uint32_t credits = 0;
  std::shared_ptr<Queues> queues;
  RailAddress address;
  uint32_t life = 0;  // kReady: of the peer's device
  ibv_qp* qp = nullptr;
  uint32_t qpn = 0;
  uint64_t id = 0;
  std::shared_ptr<ReceiveBlock> block;
  Status status;
};

class Handover {
 public:
  Handover();
  bool ok() const { return static_cast<bool>(jobs_fd_) && static_cast<bool>(news_fd_); }

  void ask(Job job);        // to the service thread
  std::vector<Job> jobs();  // service thread: takes them all
  void stop();              // the service thread ends
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  int jobs_fd() const { return jobs_fd_.get(); }

  void post(News news);  // to the lock's holder; from any thread
  bool has_news() const { return has_news_.load(std::memory_order_acquire); }
  std::vector<News> news();  // engine lock: takes them all
  int news_fd() const { return news_fd_.get(); }

 private:
  std::mutex jobs_mutex_;
  std::vector<Job> jobs_;
  std::mutex news_mutex_;
  std::vector<News> news_;
  std::atomic<bool> has_news_{false};  // partner: post() sets it under the lock, news() clears it under the lock
  std::atomic<bool> stopping_{false};  // partner: stop() before its ring, the service thread after it woke
  UniqueFd jobs_fd_;
  UniqueFd news_fd_;
};

}  // namespace asyncfabric::verbs
