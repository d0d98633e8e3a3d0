// A simulated accelerator: a device type of its own on PyTorch's PrivateUse1. Its rules are in sim.py.
//
// Device memory is host memory that only operators of this file reach. An operator runs at once, as the CPU's kernel on
// the same bytes. Copies and collectives may run late: they lie in the queue of their stream until somebody waits.
// Every stream and the host have a vector clock; two accesses to a block that no clock orders are an error.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <list>
#include <map>
#include <random>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;
constexpr int kStreamsOfAPool = 32;  // per priority, handed out in turn as CUDA does
constexpr int kPoison = 0xFF;        // NaN in every format of a float

// ---------------------------------------------------------------- what the process has

struct Settings {
  int devices = 0;
  size_t memory = 0;
  int64_t lost_after = -1;
  bool has_float64 = true;
} settings;

// What has happened before: of each stream, the number of its latest access that is known to be over.
struct Clock {
  std::vector<uint64_t> seen;

  uint64_t of(size_t stream) const { return stream < seen.size() ? seen[stream] : 0; }
  void join(const Clock& other) {
    if (seen.size() < other.seen.size()) seen.resize(other.seen.size());
    for (size_t i = 0; i < other.seen.size(); ++i) seen[i] = std::max(seen[i], other.seen[i]);
  }
  uint64_t tick(size_t stream) {
    if (seen.size() <= stream) seen.resize(stream + 1);
    return ++seen[stream];
  }
};

struct Access {
  uint64_t time = 0;  // 0: none
  std::string by;
};

struct Queue;

// A piece of device memory. It keeps the record of its accesses when it is freed and handed out again.
struct Block {
  char* bytes = nullptr;
  size_t size = 0;
  size_t used = 0;  // of the size, what the present owner has asked for, rounded
  int device = 0;
  Queue* home = nullptr;  // the stream that it was allocated on
  int pending = 0;        // tasks in queues that will touch it
  bool poisoned = false;
  Queue* writer = nullptr;
  Access written;
  std::map<Queue*, Access> read;      // since it was written
  std::map<Queue*, bool> also_used;  // record_stream
};

struct PinnedBlock {
  size_t size = 0;
  int pending = 0;
};

// Work that is done late: a copy, the end of a collective, or a wait for another stream.
struct Task {
  std::function<void()> run;
  std::vector<int*> pending;  // counters of what it touches
  std::vector<at::Tensor> alive;
  Queue* other = nullptr;
  uint64_t until = 0;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;  // over before it runs
};

struct Queue {
  size_t number = 0;  // among all streams of all devices
  c10::Device device = c10::Device(kSim, 0);
  c10::StreamId id = 0;
  Clock clock;
  std::deque<Task> tasks;
  uint64_t submitted = 0;
  uint64_t completed = 0;
};

struct Event {
  Queue* queue = nullptr;
  uint64_t until = 0;
  Clock clock;
  std::chrono::steady_clock::time_point at;
};

// Tensors may die after the end of main(), so what their memory needs is never destroyed.
std::mutex& mutex = *new std::mutex;  // of everything below
std::mt19937_64 dice;
Clock& host = *new Clock;
auto& queues = *new std::vector<std::unique_ptr<Queue>>;
auto& queue_of = *new std::map<std::pair<int, c10::StreamId>, Queue*>;
auto& pinned = *new std::map<uintptr_t, PinnedBlock>;
int64_t launched = 0;
bool used = false;      // a child that is forked from now on cannot use the device
bool in_child = false;  // it is such a child

thread_local int current_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> current_stream{};

// Holds the lock. Tasks that are over end with it, not under it: what they kept alive may need Python's lock to die.
class Locked {
  std::vector<Task> over_;
  std::unique_lock<std::mutex> lock_{mutex};

 public:
  void end(Task&& task) { over_.push_back(std::move(task)); }
  template <typename F>
  void without(F&& what) {
    struct Again {
      std::unique_lock<std::mutex>& lock;
      ~Again() { lock.lock(); }
    } again{lock_};
    lock_.unlock();
    what();
  }
};

bool coin() { return dice() & 1; }

void check_usable(bool launches = false) {
  TORCH_CHECK(
      !in_child,
      "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the 'spawn' start "
      "method");
  used = true;
  if (launches) ++launched;
  TORCH_CHECK(settings.lost_after < 0 || launched <= settings.lost_after, "sim: the device was lost");
}

c10::Device device_of(int index) { return c10::Device(kSim, static_cast<c10::DeviceIndex>(index)); }

int checked(int index) {
  TORCH_CHECK(
      index >= 0 && index < settings.devices, "sim: there is no device ", index, ", there are ", settings.devices);
  return index;
}

Queue& queue_at(int device, c10::StreamId id) {
  auto& found = queue_of[{checked(device), id}];
  if (!found) {
    queues.push_back(std::make_unique<Queue>());
    found = queues.back().get();
    found->number = queues.size() - 1;
    found->device = device_of(device);
    found->id = id;
  }
  return *found;
}

Queue& queue_of_stream(const c10::Stream& stream) { return queue_at(stream.device_index(), stream.id()); }

Queue& current_queue(int device) { return queue_at(device, current_stream[checked(device)]); }

// Kernels of the CPU that this file calls see neither autograd, autocast nor modes of Python.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard others{
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher})};
};

// ---------------------------------------------------------------- queues

void run_until(Locked& lock, Queue& queue, uint64_t until) {
  while (queue.completed < until) {
    Task& next = queue.tasks.front();
    if (next.other && next.other->completed < next.until) {
      run_until(lock, *next.other, next.until);
      continue;
    }
    std::exception_ptr failure;
    if (!next.works.empty()) {  // a collective of other ranks may take long: others go on meanwhile, and may finish it
      auto works = next.works;
      auto before = queue.completed;
      lock.without([&] {
        try {
          for (auto& work : works) work->wait();
        } catch (...) {
          failure = std::current_exception();
        }
      });
      if (queue.completed != before) continue;
    }
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    ++queue.completed;
    for (int* count : task.pending) --*count;
    if (task.run && !failure) {
      Below below;
      try {
        task.run();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    lock.end(std::move(task));
    if (failure) std::rethrow_exception(failure);
  }
}

void drain(Locked& lock, Queue& queue) { run_until(lock, queue, queue.submitted); }

void submit(Queue& queue, Task&& task) {
  for (int* count : task.pending) ++*count;
  queue.tasks.push_back(std::move(task));
  ++queue.submitted;
}

void wait_for(Queue& queue, Queue& other, uint64_t until, const Clock& clock) {
  queue.clock.join(clock);
  if (&queue == &other || other.completed >= until) return;
  Task task;
  task.other = &other;
  task.until = until;
  submit(queue, std::move(task));
}

void wait_for(Queue& queue, Queue& other) { wait_for(queue, other, other.submitted, other.clock); }

// The order of streams that nothing orders is the dice's.
void drain_device(Locked& lock, int device) {
  for (;;) {
    std::vector<Queue*> busy;
    for (auto& queue : queues)
      if (queue->device.index() == device && queue->completed < queue->submitted) busy.push_back(queue.get());
    if (busy.empty()) break;
    Queue& queue = *busy[dice() % busy.size()];
    run_until(lock, queue, queue.completed + 1);
  }
}

void synchronize_device(int device) {
  Locked lock;
  check_usable();
  drain_device(lock, checked(device));
  for (auto& queue : queues)
    if (queue->device.index() == device) host.join(queue->clock);
}

void synchronize(Locked& lock, Queue& queue, uint64_t until, const Clock& clock) {
  check_usable();
  run_until(lock, queue, until);
  host.join(clock);
}

// Whether it is over. Who asks often enough is told yes: each question may do some of the work.
bool is_over(Locked& lock, Queue& queue, uint64_t until, const Clock& clock) {
  check_usable();
  bool known = queue.completed >= until;
  for (size_t i = 0; known && i < clock.seen.size(); ++i) known = clock.seen[i] <= host.of(i);
  if (known) return true;
  if (coin()) return false;
  if (queue.completed < until) {
    auto& works = queue.tasks.front().works;
    for (auto& work : works)
      if (!work->isCompleted()) return false;
    run_until(lock, queue, queue.completed + 1);
  }
  if (queue.completed < until) return false;
  host.join(clock);
  return true;
}

// ---------------------------------------------------------------- races

std::string name_of(const Queue& queue) { return c10::str("stream ", queue.id, " of ", queue.device); }

void check_order(const Block& block, const Queue& queue, bool writes, const std::string& by) {
  auto check = [&](const Queue* other, const Access& before, const char* has) {
    TORCH_CHECK(
        !before.time || queue.clock.of(other->number) >= before.time, "sim: stream race: ", by, " on ", name_of(queue),
        writes ? " writes" : " reads", " memory that ", before.by, " on ", name_of(*other), has,
        ", and no event, wait or synchronization orders the two");
  };
  if (block.writer) check(block.writer, block.written, " has written");
  if (!writes) return;
  for (auto& [reader, access] : block.read) check(reader, access, " has read");
}

void access(Block* block, Queue& queue, bool writes, const std::string& by) {
  if (!block) return;
  check_order(*block, queue, writes, by);
  Access now{queue.clock.of(queue.number), by};
  if (writes) {
    block->writer = &queue;
    block->written = std::move(now);
    block->read.clear();
  } else {
    block->read[&queue] = std::move(now);
  }
}

// ---------------------------------------------------------------- memory

struct Limbo {
  Block* block;
  std::vector<Event> until;
};

struct Pool {
  std::multimap<std::pair<Queue*, size_t>, Block*> cached;
  std::list<Limbo> limbo;  // freed, but used on streams that may still run
  c10::CachingDeviceAllocator::DeviceStats stats;
};
auto& pools = *new std::array<Pool, kMostDevices>;

size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Locked lock;
    check_usable();
    int device = checked(current_device);
    if (!bytes) return {nullptr, nullptr, &release, device_of(device)};
    auto size = rounded(bytes);
    auto& stats = pools[device].stats;
    Queue& queue = current_queue(device);
    queue.clock.join(host);
    retire(lock, device, false);
    Block* block = from_cache(lock, queue, size);
    if (!block) {
      block = new Block;
      make_room(lock, device, size, bytes);
      block->bytes = static_cast<char*>(aligned_alloc(512, size));
      block->size = size;
      block->device = device;
      stats.reserved_bytes[0].increase(size);
      stats.segment[0].increase(1);
      ++stats.num_device_alloc;
    }
    if (!block->poisoned) memset(block->bytes, kPoison, block->size);
    block->poisoned = false;
    block->used = size;
    block->home = &queue;
    stats.allocated_bytes[0].increase(size);
    stats.active_bytes[0].increase(size);
    stats.requested_bytes[0].increase(bytes);
    stats.allocation[0].increase(1);
    stats.active[0].increase(1);
    return {block->bytes, block, &release, device_of(device)};
  }

  static Block* block_of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return nullptr;
    return block_of(tensor.storage().data_ptr());
  }

  static Block* block_of(const c10::DataPtr& pointer) {
    return pointer.get_deleter() == &release ? static_cast<Block*>(pointer.get_context()) : nullptr;
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Locked lock;
    check_usable();
    for (int device = 0; device < settings.devices; ++device) give_back(lock, device);
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Locked lock;
    if (auto* block = block_of(pointer)) block->also_used[&queue_of_stream(stream)] = true;
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked lock;
    return pools[checked(device)].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override { each_stat(device, [](auto& stat) { stat.reset_peak(); }); }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Locked lock;
    return {settings.memory - pools[checked(device)].stats.reserved_bytes[0].current, settings.memory};
  }

  void copy_data(void* target, const void* source, std::size_t bytes) const override { memcpy(target, source, bytes); }

 private:
  template <typename F>
  void each_stat(int device, F&& what) {
    Locked lock;
    auto& stats = pools[checked(device)].stats;
    for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes,
                       &stats.allocation, &stats.segment, &stats.active})
      what((*stat)[0]);
  }

  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    if (!block) return;
    Locked lock;
    auto& pool = pools[block->device];
    pool.stats.allocated_bytes[0].decrease(block->used);
    pool.stats.allocation[0].decrease(1);
    Limbo limbo{block, {}};
    for (auto& [queue, yes] : block->also_used)
      if (queue != block->home) limbo.until.push_back({queue, queue->submitted, queue->clock, {}});
    block->also_used.clear();
    if (limbo.until.empty()) {
      recycle(block);
    } else {
      pool.limbo.push_back(std::move(limbo));
    }
  }

  static void recycle(Block* block) {
    auto& pool = pools[block->device];
    pool.stats.active_bytes[0].decrease(block->used);
    pool.stats.active[0].decrease(1);
    if (!block->pending) {  // else a copy in a queue still reads it
      memset(block->bytes, kPoison, block->size);
      block->poisoned = true;
    }
    pool.cached.insert({{block->home, block->size}, block});
  }

  // What was freed under record_stream comes back when the streams are found to be over: sooner or later, or at once.
  static void retire(Locked& lock, int device, bool at_once) {
    std::list<Limbo> ready;
    auto& limbo = pools[device].limbo;
    for (auto it = limbo.begin(); it != limbo.end();) {
      auto here = it++;
      if (at_once || coin()) ready.splice(ready.end(), limbo, here);
    }
    for (auto& [block, until] : ready) {
      for (auto& event : until) {
        run_until(lock, *event.queue, event.until);
        auto over = [&](Queue* queue, const Access& access) { return event.clock.of(queue->number) >= access.time; };
        if (block->writer && block->writer != block->home && over(block->writer, block->written))
          block->writer = nullptr;
        for (auto it = block->read.begin(); it != block->read.end();)
          it = over(it->first, it->second) ? block->read.erase(it) : std::next(it);
      }
      recycle(block);
    }
  }

  static Block* from_cache(Locked& lock, Queue& queue, size_t size) {
    auto& cached = pools[queue.device.index()].cached;
    auto found = cached.lower_bound({&queue, size});
    if (found == cached.end() || found->first.first != &queue || found->first.second > size + size / 4) return nullptr;
    auto* block = found->second;
    check_order(*block, queue, true, "the allocator");
    cached.erase(found);
    if (block->pending) drain(lock, queue);
    return block;
  }

  static void give_back(Locked& lock, int device) {
    auto& pool = pools[device];
    drain_device(lock, device);
    retire(lock, device, true);
    for (auto& [key, block] : pool.cached) {
      pool.stats.reserved_bytes[0].decrease(block->size);
      pool.stats.segment[0].decrease(1);
      ++pool.stats.num_device_free;
      free(block->bytes);
      delete block;
    }
    pool.cached.clear();
  }

  static void make_room(Locked& lock, int device, size_t size, size_t bytes) {
    auto& stats = pools[device].stats;
    auto full = [&] { return stats.reserved_bytes[0].current + size > settings.memory; };
    if (!full()) return;
    ++stats.num_alloc_retries;
    give_back(lock, device);
    if (!full()) return;
    ++stats.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes, " bytes. Device ", device, " has ",
        settings.memory, " bytes, of which ", stats.allocated_bytes[0].current, " are allocated");
  }
};
Memory& memory = *new Memory;

REGISTER_ALLOCATOR(kSim, &memory);

// Host memory that the device can reach by itself.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Locked lock;
    check_usable();
    TORCH_CHECK(settings.devices > 0, "sim: there is no device that memory could be pinned for");
    if (!bytes) return {nullptr, c10::Device(c10::kCPU)};
    void* made = aligned_alloc(512, rounded(bytes));
    memset(made, kPoison, rounded(bytes));
    pinned[reinterpret_cast<uintptr_t>(made)] = {bytes, 0};
    return {made, made, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { memcpy(target, source, bytes); }
  static PinnedBlock* find(const void* pointer) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    auto after = pinned.upper_bound(address);
    if (after == pinned.begin()) return nullptr;
    auto& [begin, block] = *std::prev(after);
    return address < begin + block.size ? &block : nullptr;
  }

 private:
  static void release(void* pointer) {
    Locked lock;
    pinned.erase(reinterpret_cast<uintptr_t>(pointer));
    free(pointer);
  }
};
PinnedMemory& pinned_memory = *new PinnedMemory;

// ---------------------------------------------------------------- devices, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return device_of(current_device); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) current_device = checked(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(settings.devices); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability all;
    return all;
  }

  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, device_of(index(device)), id);
  }
  int index(c10::Device device) const { return device.has_index() ? checked(device.index()) : current_device; }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high = false) const override {
    static std::atomic<int> next[2][kMostDevices];
    int turn = next[high][index(device)]++ % kStreamsOfAPool;
    return stream(device, 1 + high * kStreamsOfAPool + turn);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    current_stream[checked(stream.device_index())] = stream.id();
    return old;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Locked lock;
    Queue& queue = queue_of_stream(stream);
    return is_over(lock, queue, queue.submitted, queue.clock);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Locked lock;
    Queue& queue = queue_of_stream(stream);
    synchronize(lock, queue, queue.submitted, Clock(queue.clock));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    memory.recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag how) const override {
    Locked lock;
    check_usable();
    Queue& queue = queue_of_stream(stream);
    queue.clock.join(host);
    // The time is the stream's to tell: nobody knows that it is there before he asks or waits.
    if (how == c10::EventFlag::BACKEND_DEFAULT) queue.clock.tick(queue.number);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {&queue, queue.submitted, queue.clock, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Locked lock;
    check_usable();
    auto& recorded = *static_cast<Event*>(event);
    wait_for(queue_of_stream(stream), *recorded.queue, recorded.until, recorded.clock);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Locked lock;
    Event recorded = *static_cast<Event*>(event);
    return is_over(lock, *recorded.queue, recorded.until, recorded.clock);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Locked lock;
    Event recorded = *static_cast<Event*>(event);
    synchronize(lock, *recorded.queue, recorded.until, recorded.clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    auto passed = static_cast<Event*>(end)->at - static_cast<Event*>(begin)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- random numbers

// A generator of the CPU behind the device's name, so that a seed gives the same numbers on both.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;

  Generator(int device, at::Generator from)
      : c10::GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(from)) {}
  explicit Generator(int device) : Generator(device, at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), inner.clone()); }
};

const at::Generator& default_generator(int device) {
  static auto all = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kMostDevices; ++index) made.push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return all[checked(device < 0 ? current_device : device)];
}

at::Generator cpu_generator(const std::optional<at::Generator>& given, int device) {
  auto& generator = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(
      generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '", generator.device(),
      "'");
  return static_cast<Generator&>(*generator.unsafeGetGeneratorImpl()).inner;
}

// ---------------------------------------------------------------- what torch asks of a backend

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings.devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return used; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(checked(device < 0 ? current_device : device));
  }
  bool isPinnedPtr(const void* pointer) const override {
    Locked lock;
    return PinnedMemory::find(pointer) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(settings.devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = checked(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = getCurrentDevice();
    setCurrentDevice(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    auto old = getCurrentDevice();
    if (device >= 0 && device < settings.devices) current_device = device;
    return old;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto made = memory.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) memcpy(made.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
Hooks& hooks = *new Hooks;

// ---------------------------------------------------------------- operators

// The same bytes as a tensor of the CPU. It keeps nothing alive; a kernel may give it other memory.
at::ScalarType held(at::ScalarType type) {
  TORCH_CHECK_TYPE(type != at::kDouble || settings.has_float64, "sim: the device has no float64");
  return type;
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::kCPU), c10::GetCPUAllocator(), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// One operator on one device: checks where its tensors are and that they are ordered, and makes its results.
class Launch {
  std::string name_;
  int before_ = current_device;
  Below below_;

 public:
  std::vector<at::Tensor> reads, writes;

  explicit Launch(std::string name) : name_(std::move(name)) {}
  Launch(std::string name, std::vector<at::Tensor> read, std::vector<at::Tensor> written = {})
      : name_(std::move(name)), reads(std::move(read)), writes(std::move(written)) {
    begin(std::nullopt);
  }
  Launch(const Launch&) = delete;
  ~Launch() { current_device = before_; }

  void begin(std::optional<c10::Device> wanted) {
    for (auto* group : {&writes, &reads}) {
      for (auto& tensor : *group) {
        if (!tensor.defined() || (!tensor.is_privateuseone() && tensor.dim() == 0 && group == &reads)) continue;
        if (!wanted) wanted = tensor.device();
        if (*wanted != tensor.device() || !tensor.is_privateuseone()) mixed(group == &writes);
      }
    }
    if (wanted && wanted->has_index()) current_device = checked(wanted->index());
    Locked lock;
    check_usable(true);
    Queue& queue = current_queue(current_device);
    queue.clock.join(host);
    drain(lock, queue);
    queue.clock.tick(queue.number);
    for (auto& tensor : reads) access(Memory::block_of(tensor), queue, false, name_);
    for (auto& tensor : writes) access(Memory::block_of(tensor), queue, true, name_);
  }

  // Its result, which the CPU has computed, in device memory of its own.
  at::Tensor out(const at::Tensor& computed) {
    if (!computed.defined()) return computed;
    at::Tensor made = at::detail::empty_strided_generic(
        computed.sizes(), computed.strides(), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        held(computed.scalar_type()));
    if (computed.is_non_overlapping_and_dense() && !computed.is_conj() && !computed.is_neg()) {
      if (made.numel()) memcpy(made.mutable_data_ptr(), computed.const_data_ptr(), computed.nbytes());
    } else {
      as_cpu(made).copy_(computed);
    }
    Locked lock;
    Queue& queue = current_queue(current_device);
    access(Memory::block_of(made), queue, true, name_);
    return made;
  }

 private:
  [[noreturn]] void mixed(bool writes_it) {
    std::vector<c10::Device> found;
    for (auto* group : {&writes, &reads})
      for (auto& tensor : *group)
        if (tensor.defined() && (tensor.dim() || tensor.is_privateuseone() || writes_it))
          if (std::find(found.begin(), found.end(), tensor.device()) == found.end()) found.push_back(tensor.device());
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", found.front(),
        " and ", found.back(), "! (", name_, ")");
  }
};

// Calls an operator's kernel of the CPU on the bytes of the device.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto count = schema.arguments().size();
  auto first = stack->size() - count;
  Launch launch(schema.name());
  std::optional<c10::Device> wanted;
  bool copies_indices = schema.name().find("index") != std::string::npos;
  struct Given {
    at::Tensor ours, cpu;
    bool written;
  };
  std::vector<Given> given;

  auto use = [&](const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    (written ? launch.writes : launch.reads).push_back(tensor);
    auto cpu = as_cpu(tensor);
    given.push_back({tensor, cpu, written});
    return cpu;
  };
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    auto& argument = schema.arguments()[i];
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = use(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(use(tensor, written));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        bool stays = !tensor || (copies_indices && tensor->is_cpu());  // as on CUDA, indices may come from the host
        list.push_back(stays ? tensor : std::optional<at::Tensor>(use(*tensor, written)));
      }
      value = std::move(list);
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      wanted = value.toDevice().has_index() ? value.toDevice() : device_of(current_device);
      value = c10::Device(c10::kCPU);
    }
  }
  launch.begin(wanted);
  for (size_t i = 0; i < count; ++i) {  // after the device is known
    auto& value = (*stack)[first + i];
    if (value.isGenerator()) {
      value = cpu_generator(value.toGenerator(), current_device);
    } else if (value.isNone() && schema.arguments()[i].type()->str() == "Generator?") {
      value = cpu_generator(std::nullopt, current_device);
    }
  }

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (auto& [ours, cpu, written] : given) {
    if (!written || cpu.is_same(ours)) continue;
    if (cpu.storage().data() != ours.storage().data()) {  // the kernel has resized it
      hooks.resizePrivateUse1Bytes(ours.storage(), cpu.storage().nbytes());
      memcpy(ours.storage().mutable_data(), cpu.storage().data(), cpu.storage().nbytes());
      Locked lock;
      access(Memory::block_of(ours), current_queue(current_device), true, schema.name());
    }
    if (cpu.sizes() != ours.sizes() || cpu.strides() != ours.strides())
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
  auto result = [&](const at::Tensor& computed) -> at::Tensor {
    if (!computed.defined()) return computed;
    for (auto& [ours, cpu, written] : given) {
      if (cpu.is_same(computed)) return ours;
      if (!ours.is_privateuseone() || !computed.storage().is_alias_of(cpu.storage())) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(  // of the same memory
          c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), computed.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(
          computed.sizes(), computed.strides(), computed.storage_offset());
      return view;
    }
    return launch.out(computed);
  };
  auto returned = schema.returns().size();
  for (size_t i = stack->size() - returned; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(result(tensor));
      value = std::move(list);
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Where other devices would get a composite of other operators, which differs from the CPU's kernel in the last bit.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (auto* name : {"native_layer_norm", "native_group_norm", "mish_backward", "linalg__powsum", "addr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Memory and views, which compute nothing.
c10::Device chosen(const std::optional<c10::Device>& device) {
  return device && device->has_index() ? *device : device_of(current_device);
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(chosen(device));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &memory, keys, held(at::dtype_or_default(type)), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(chosen(device));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &memory, keys, held(at::dtype_or_default(type)));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  auto begin = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), begin);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, sizes, strides);
}

void record_stream(at::Tensor& self, c10::Stream stream) { memory.recordStream(self.storage().data_ptr(), stream); }

// Copies between memories. `late` ones lie in the queue of their stream.
void poison(const at::Tensor& cpu) {
  if (cpu.is_non_overlapping_and_dense()) {
    if (cpu.numel()) memset(cpu.mutable_data_ptr(), kPoison, cpu.nbytes());
  } else if (cpu.is_floating_point()) {
    cpu.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    cpu.fill_(-1);
  }
}

at::Tensor copy_between(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  bool from = source.is_privateuseone(), to = target.is_privateuseone();
  if (from && to && source.device() == target.device()) {
    Launch launch("aten::copy_", {source}, {target});
    as_cpu(target).copy_(as_cpu(source));
    return target;
  }
  Below below;
  Locked lock;
  check_usable(true);
  int device = from ? source.device().index() : target.device().index();
  Queue& queue = current_queue(device);
  queue.clock.join(host);
  if (from && to) wait_for(queue, current_queue(target.device().index()));
  queue.clock.tick(queue.number);
  if (from) access(Memory::block_of(source), queue, false, "aten::copy_");
  if (to) access(Memory::block_of(target), queue, true, "aten::copy_");

  Task task;
  bool reachable = true;
  for (auto* tensor : {&source, &target}) {
    if (auto* block = tensor->is_privateuseone() ? Memory::block_of(*tensor) : nullptr) {
      task.pending.push_back(&block->pending);
    } else if (auto* host_block = PinnedMemory::find(tensor->const_data_ptr())) {
      task.pending.push_back(&host_block->pending);
      task.alive.push_back(*tensor);
    } else {
      reachable = tensor->numel() == 0 && reachable;
    }
  }
  if (non_blocking && reachable && target.numel()) {
    if (*task.pending.back()) drain(lock, queue);  // what is under way to or from the target comes first
    poison(as_cpu(target));
    task.run = [source = as_cpu(source), target = as_cpu(target)] { target.copy_(source); };
    submit(queue, std::move(task));
  } else {
    drain(lock, queue);
    as_cpu(target).copy_(as_cpu(source));
    if (!to || !non_blocking) host.join(queue.clock);
  }
  if (from && to) wait_for(current_queue(target.device().index()), queue);
  return target;
}

at::Tensor copy_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_between(source, target, false);
}

at::Scalar item(const at::Tensor& self) {
  Launch launch("aten::item", {self});
  auto value = as_cpu(self).item();
  Locked lock;
  host.join(current_queue(self.device().index()).clock);
  return value;
}

// Whether `parameter.data = moved` keeps the parameter, as between CUDA and the CPU.
bool compatible(const at::Tensor& self, const at::Tensor& from) {
  auto plain = [](const at::Tensor& tensor) {
    return (tensor.is_cpu() || tensor.is_privateuseone()) && tensor.layout() == at::kStrided &&
        !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  };
  if (plain(self) && plain(from)) return true;
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &compatible);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &compatible);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("alias", &at::native::alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_between);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
}

TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// Operators that the CPU has under another name.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  auto offset = bias.value_or(at::Tensor());
  Launch launch("aten::convolution", {input, weight, offset});
  return launch.out(at::convolution(
      as_cpu(input), as_cpu(weight), as_cpu(offset), stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  Launch launch("aten::convolution_backward", {grad, input, weight});
  int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [a, b, c] = at::convolution_backward(
      as_cpu(grad), as_cpu(input), as_cpu(weight), at::IntArrayRef({channels}), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  return {launch.out(a), launch.out(b), launch.out(c)};
}

// The mask as the CPU's dropout makes it, which has no such kernel: the same seed, the same numbers.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  Launch launch("aten::native_dropout", {input});
  auto cpu = as_cpu(input);
  if (!train.value_or(true) || p == 0)
    return {launch.out(cpu), launch.out(at::ones(cpu.sizes(), cpu.options().dtype(at::kBool)))};
  auto noise = at::empty_like(cpu).bernoulli_(1 - p, cpu_generator(std::nullopt, current_device));
  auto mask = noise.to(at::kBool);
  return {launch.out(p == 1 ? at::zeros_like(cpu) : cpu * noise.div_(1 - p)), launch.out(mask)};
}

at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  Launch launch("aten::native_dropout_backward", {grad, mask});
  auto noise = as_cpu(mask).to(grad.scalar_type());
  return launch.out(as_cpu(grad) * (scale ? noise.div_(1 / scale) : noise));
}

int64_t attention_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  Below below;
  auto cpu_mask = mask && mask->defined() ? std::optional<at::Tensor>(as_cpu(*mask)) : std::nullopt;
  auto choice = at::_fused_sdp_choice(
      as_cpu(query), as_cpu(key), as_cpu(value), cpu_mask, dropout, causal, scale, grouped);
  bool fused = choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
  if (mask && mask->defined() && mask->requires_grad()) fused = false;
  return static_cast<int64_t>(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::optional<at::Tensor> some(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(as_cpu(tensor)) : std::nullopt;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, bool, std::optional<double> scale) {
  auto bias = mask.value_or(at::Tensor());
  Launch launch("aten::scaled_dot_product_attention", {query, key, value, bias});
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      as_cpu(query), as_cpu(key), as_cpu(value), dropout, causal, some(bias), scale);
  at::Tensor none = launch.out(at::empty({0}, at::kLong));
  return {launch.out(out), launch.out(sums), none, none, query.size(2), key.size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4>, const at::Tensor& out, const at::Tensor& sums, const at::Tensor&,
    const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  Launch launch("aten::scaled_dot_product_attention_backward", {grad, query, key, value, bias, out, sums});
  auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      as_cpu(grad), as_cpu(query), as_cpu(key), as_cpu(value), as_cpu(out), as_cpu(sums), dropout, causal, some(bias),
      scale);
  return {launch.out(a), launch.out(b), launch.out(c), at::Tensor()};
}

// The CPU takes statistics of 32 bits only with weights of 32 bits; CUDA takes any.
std::optional<at::Tensor> as_wide_as(const at::Tensor& tensor, const at::Tensor& statistics) {
  if (!tensor.defined() || !statistics.defined()) return some(tensor);
  return as_cpu(tensor).to(statistics.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, bool training,
    double momentum, double eps) {
  at::Tensor w = weight.value_or(at::Tensor()), b = bias.value_or(at::Tensor());
  at::Tensor mean = running_mean.value_or(at::Tensor()), var = running_var.value_or(at::Tensor());
  std::vector<at::Tensor> given{input, w, b}, statistics{mean, var};
  if (!training) given.insert(given.end(), {mean, var});
  Launch launch("aten::native_batch_norm", given, training ? statistics : std::vector<at::Tensor>());
  auto [out, saved_mean, saved_invstd] = at::native_batch_norm(
      as_cpu(input), as_wide_as(w, mean), as_wide_as(b, mean), some(mean), some(var), training, momentum, eps);
  return {launch.out(out), launch.out(saved_mean), launch.out(saved_invstd)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(
    const at::Tensor& grad, const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var,
    const std::optional<at::Tensor>& saved_mean, const std::optional<at::Tensor>& saved_invstd, bool train, double eps,
    std::array<bool, 3> mask) {
  at::Tensor w = weight.value_or(at::Tensor());
  at::Tensor mean = running_mean.value_or(at::Tensor()), var = running_var.value_or(at::Tensor());
  at::Tensor saved[] = {saved_mean.value_or(at::Tensor()), saved_invstd.value_or(at::Tensor())};
  Launch launch("aten::native_batch_norm_backward", {grad, input, w, mean, var, saved[0], saved[1]});
  auto [a, b, c] = at::native_batch_norm_backward(
      as_cpu(grad), as_cpu(input), as_wide_as(w, mean), some(mean), some(var), some(saved[0]), some(saved[1]), train,
      eps, mask);
  auto narrow = [&](const at::Tensor& made) { return made.defined() && w.defined() ? made.to(w.scalar_type()) : made; };
  return {launch.out(a), launch.out(narrow(b)), launch.out(narrow(c))};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_batch_norm", &batch_norm);
  m.impl("native_batch_norm_backward", &batch_norm_backward);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_dropout", &native_dropout);
  m.impl("native_dropout_backward", &native_dropout_backward);
  m.impl("_fused_sdp_choice", &attention_choice);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

// The parts of SyncBatchNorm, which the CPU does not have. All dimensions but the second are reduced.
std::vector<int64_t> reduced(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

at::Tensor spread(const at::Tensor& channels, const at::Tensor& input) {
  std::vector<int64_t> sizes(input.dim(), 1);
  sizes[1] = input.size(1);
  return channels.view(sizes);
}

std::tuple<at::Tensor, at::Tensor> batch_norm_stats(const at::Tensor& input, double eps) {
  auto [var, mean] = at::var_mean(input.to(at::kFloat), at::OptionalIntArrayRef(reduced(input)), false, false);
  return {mean, at::rsqrt(var + eps)};
}

std::tuple<at::Tensor, at::Tensor> batch_norm_gather_stats(
    const at::Tensor&, const at::Tensor& means, const at::Tensor& invstds,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, double momentum,
    double eps, const at::Tensor& counts) {
  auto weights = counts.to(at::kFloat).view({-1, 1});
  auto total = weights.sum();
  auto mean = (means * weights).sum(0) / total;
  auto var = ((invstds.pow(-2) - eps + (means - mean).pow(2)) * weights).sum(0) / total;
  if (running_mean && running_mean->defined()) running_mean->mul_(1 - momentum).add_(mean, momentum);
  if (running_var && running_var->defined())
    running_var->mul_(1 - momentum).add_(var * total / (total - 1), momentum);
  return {mean, at::rsqrt(var + eps)};
}

at::Tensor batch_norm_elemt(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& mean, const at::Tensor& invstd, double) {
  auto made = (input - spread(mean, input)) * spread(invstd, input);
  if (weight && weight->defined()) made = made * spread(*weight, input);
  if (bias && bias->defined()) made = made + spread(*bias, input);
  return made.to(input.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd,
    const std::optional<at::Tensor>& weight, bool, bool, bool) {
  auto wide = grad.to(at::kFloat);
  auto sum = wide.sum(reduced(input));
  auto product = (wide * (input - spread(mean, input))).sum(reduced(input));
  auto type = weight && weight->defined() ? weight->scalar_type() : at::kFloat;
  return {sum, product, (product * invstd).to(type), sum.to(type)};
}

at::Tensor batch_norm_backward_elemt(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd,
    const std::optional<at::Tensor>& weight, const at::Tensor& sum, const at::Tensor& product,
    const at::Tensor& counts) {
  auto total = counts.sum();
  auto along = (input - spread(mean, input)) * spread(invstd.pow(2) * product / total, input);
  auto made = (grad - spread(sum / total, input) - along) * spread(invstd, input);
  if (weight && weight->defined()) made = made * spread(*weight, input);
  return made.to(input.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("batch_norm_stats", &batch_norm_stats);
  m.impl("batch_norm_gather_stats_with_counts", &batch_norm_gather_stats);
  m.impl("batch_norm_elemt", &batch_norm_elemt);
  m.impl("batch_norm_backward_reduce", &batch_norm_backward_reduce);
  m.impl("batch_norm_backward_elemt", &batch_norm_backward_elemt);
}

// ---------------------------------------------------------------- autocast, with CUDA's lists

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_UNLESS_GIVEN(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

using at::Scalar;
using at::ScalarType;
using at::Tensor;
using c10::IntArrayRef;

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_UNLESS_GIVEN)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}

// ---------------------------------------------------------------- collectives

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// What a collective gives at once: the promise that the work of its stream up to `until` is done.
class Promise final : public c10d::Work {
  Queue* queue_;
  Tensors inputs_, results_;  // what it reads is freed after the wait at the earliest, as by NCCL
  bool blocks_;
  Event done_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;

 public:
  Promise(int rank, c10d::OpType type, Queue& queue, Tensors inputs, Tensors results, bool blocks)
      : Work(rank, type), queue_(&queue), inputs_(std::move(inputs)), results_(std::move(results)), blocks_(blocks) {
    done_ = {queue_, queue_->submitted, queue_->clock, {}};
  }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    Tensors waited = std::move(inputs_);
    Locked lock;
    check_usable();
    if (blocks_) {
      sim::synchronize(lock, *done_.queue, done_.until, done_.clock);
    } else {
      wait_for(current_queue(queue_->device.index()), *done_.queue, done_.until, done_.clock);
    }
    return true;
  }
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  bool isCompleted() override {
    Locked lock;
    return is_over(lock, *done_.queue, done_.until, done_.clock);
  }
  bool isSuccess() const override { return true; }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  // A future's value is used on streams that wait for the one it was completed on.
  void complete_future() {
    std::vector<c10::Device> devices{queue_->device};
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, queue_->device, queue_->id));
    future_->markCompleted(c10::IValue(results_));
  }
};

// Collectives through gloo, on copies in host memory. They read their inputs on a stream of the group that waits for
// the current one, and are over when that stream is waited for. Until then the results are poison.
class Simccl final : public c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, c10::StreamId> streams_;
  uint64_t count_ = 0;

  // `begin` gets the inputs on the host, starts gloo, and gives what gloo will write; it goes to `results` when it is
  // there, divided by `divisor`.
  using Begin = std::function<std::pair<Works, Tensors>(Tensors& inputs)>;
  c10::intrusive_ptr<c10d::Work> launch(
      c10d::OpType type, const Tensors& inputs, const Tensors& results, const Begin& begin, double divisor = 1,
      bool blocks = false) {
    int device = current_device;
    auto name = c10::str("simccl.", c10d::opTypeToString(type));
    for (auto* group : {&inputs, &results})
      for (auto& tensor : *group)
        TORCH_CHECK(
            tensor.device() == device_of(device), "simccl: a tensor is on ", tensor.device(),
            ", but this rank's device is ", device_of(device));
    for (size_t i = 0; i < results.size() && !inputs.empty(); ++i)
      TORCH_CHECK(
          results[i].scalar_type() == inputs[0].scalar_type(), name, ": tensors must have one type, but are ",
          inputs[0].scalar_type(), " and ", results[i].scalar_type());
    if (!streams_.count(device)) streams_[device] = Guard().getStreamFromGlobalPool(device_of(device)).id();
    Queue* queue;
    Tensors host_inputs;
    Task task;
    {
      Below below;
      Locked lock;
      check_usable(true);
      queue = &queue_at(device, streams_[device]);
      Queue& current = current_queue(device);
      current.clock.join(host);
      drain(lock, current);
      wait_for(*queue, current);
      queue->clock.tick(queue->number);
      for (auto* group : {&inputs, &results}) {
        for (auto& tensor : *group) {
          auto* block = Memory::block_of(tensor);
          access(block, *queue, group == &results, name);
          if (!block) continue;
          if (block->pending) drain(lock, *queue);
          if (group == &results) task.pending.push_back(&block->pending);
        }
      }
      for (auto& tensor : inputs) host_inputs.push_back(as_cpu(tensor).clone(at::MemoryFormat::Contiguous));
      for (auto& tensor : results) poison(as_cpu(tensor));
    }
    Tensors computed;
    std::tie(task.works, computed) = begin(host_inputs);
    task.alive = results;
    task.alive.insert(task.alive.end(), inputs.begin(), inputs.end());
    task.run = [results, computed, host_inputs, divisor] {
      for (size_t i = 0; i < results.size(); ++i) {
        if (divisor != 1) computed[i].div_(divisor);
        as_cpu(results[i]).copy_(computed[i].view(results[i].scalar_type()).view(results[i].sizes()));
      }
    };
    c10::intrusive_ptr<Promise> promise;
    {
      Locked lock;
      ++count_;
      submit(*queue, std::move(task));
      promise = c10::make_intrusive<Promise>(getRank(), type, *queue, inputs, results, blocks);
    }
    promise->complete_future();
    return promise;
  }

  // Bytes, which gloo takes whatever the format of the numbers is.
  static at::Tensor bytes(const at::Tensor& contiguous) { return contiguous.view(-1).view(at::kByte); }

  // Reduces on the host, in place. An average is a sum that `launch` divides.
  Works reduce_all(Tensors& tensors, const ReduceOp& op) {
    Works works;
    for (auto& tensor : tensors) {
      c10d::AllreduceOptions options;
      options.reduceOp = plain(op, tensor);
      Tensors one{tensor};
      works.push_back(gloo_->allreduce(one, options));
    }
    return works;
  }
  static ReduceOp plain(const ReduceOp& op, at::Tensor& tensor) {
    if (op == ReduceOp::AVG) return ReduceOp::SUM;
    if (op != ReduceOp::PREMUL_SUM) return op;
    auto* factor = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    if (factor->tensor_factor.defined()) {
      tensor.mul_(as_cpu(factor->tensor_factor));
    } else {
      tensor.mul_(factor->double_factor);
    }
    return ReduceOp::SUM;
  }
  double divisor(const ReduceOp& op) const { return op == ReduceOp::AVG ? getSize() : 1; }

 public:
  explicit Simccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simccl"; }
  uint64_t getSequenceNumberForGroup() override { return count_; }
  void setSequenceNumberForGroup() override {}
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  bool supportsSplitting() const override { return gloo_->supportsSplitting(); }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    auto part = gloo_->split(c10::make_intrusive<c10d::PrefixStore>("simccl", store), ranks, options);
    return part ? c10::make_intrusive<Simccl>(std::move(part)) : nullptr;
  }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {  // a stream runs in order: the last is the end of all
    return launch(c10d::OpType::COALESCED, {}, {}, [](Tensors&) { return std::make_pair(Works(), Tensors()); });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto begin = [&](Tensors& inputs) { return std::make_pair(reduce_all(inputs, options.reduceOp), inputs); };
    return launch(c10d::OpType::ALLREDUCE, tensors, tensors, begin, divisor(options.reduceOp));
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto begin = [&](Tensors& inputs) { return std::make_pair(reduce_all(inputs, options.reduceOp), inputs); };
    auto results = getRank() == options.rootRank ? tensors : Tensors();
    return launch(c10d::OpType::REDUCE, tensors, results, begin, divisor(options.reduceOp));
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto begin = [&](Tensors& inputs) {
      Works works;
      for (auto& input : inputs) {
        Tensors one{bytes(input)};
        works.push_back(gloo_->broadcast(one, options));
      }
      return std::make_pair(works, inputs);
    };
    return launch(c10d::OpType::BROADCAST, tensors, tensors, begin);
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto begin = [&](Tensors& host_inputs) {
      auto one = bytes(host_inputs[0]);
      Tensors from{one};
      std::vector<Tensors> to{copies(one, getSize())};
      auto work = gloo_->allgather(to, from, options);
      return std::make_pair(Works{work}, to[0]);
    };
    return launch(c10d::OpType::ALLGATHER, inputs, outputs[0], begin);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    check_sizes(outputs, inputs);
    auto begin = [&](Tensors& host_inputs) {
      Works works;
      Tensors computed;
      for (auto& input : host_inputs) {
        auto from = bytes(input);
        auto to = at::empty({from.numel() * getSize()}, at::kByte);
        works.push_back(gloo_->_allgather_base(to, from, options));
        computed.push_back(to);
      }
      return std::make_pair(works, computed);
    };
    return launch(c10d::OpType::_ALLGATHER_BASE, inputs, outputs, begin);
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    check_sizes(inputs, outputs);
    auto begin = [&](Tensors& host_inputs) {
      auto works = reduce_all(host_inputs, options.reduceOp);
      Tensors computed;
      for (auto& input : host_inputs) computed.push_back(input.view(-1).chunk(getSize())[getRank()]);
      return std::make_pair(works, computed);
    };
    return launch(c10d::OpType::_REDUCE_SCATTER_BASE, inputs, outputs, begin, divisor(options.reduceOp));
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto begin = [&](Tensors& host_inputs) {
      auto works = reduce_all(host_inputs, options.reduceOp);
      return std::make_pair(works, Tensors{host_inputs[getRank()]});
    };
    return launch(c10d::OpType::REDUCE_SCATTER, inputs[0], outputs, begin, divisor(options.reduceOp));
  }

  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    bool root = getRank() == options.rootRank;
    auto begin = [&](Tensors& host_inputs) {
      auto one = bytes(host_inputs[0]);
      Tensors from{one};
      std::vector<Tensors> to;
      if (root) to.push_back(copies(one, getSize()));
      auto work = gloo_->gather(to, from, options);
      return std::make_pair(Works{work}, root ? to[0] : Tensors());
    };
    return launch(c10d::OpType::GATHER, inputs, root ? outputs[0] : Tensors(), begin);
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    bool root = getRank() == options.rootRank;
    auto begin = [&](Tensors& host_inputs) {
      Tensors to{at::empty({static_cast<int64_t>(outputs[0].nbytes())}, at::kByte)};
      std::vector<Tensors> from;
      if (root) from.emplace_back();
      for (auto& input : host_inputs) from[0].push_back(bytes(input));
      auto work = gloo_->scatter(to, from, options);
      return std::make_pair(Works{work}, to);
    };
    return launch(c10d::OpType::SCATTER, root ? inputs[0] : Tensors(), outputs, begin);
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto begin = [&](Tensors& host_inputs) {
      auto to = at::empty(output.sizes(), host_inputs[0].options());
      auto work = gloo_->alltoall_base(to, host_inputs[0], output_sizes, input_sizes, options);
      return std::make_pair(Works{work}, Tensors{to});
    };
    return launch(c10d::OpType::ALLTOALL_BASE, {input}, {output}, begin);
  }
  c10::intrusive_ptr<c10d::Work> alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto begin = [&](Tensors& host_inputs) {
      std::vector<int64_t> to_sizes, from_sizes;
      for (auto& input : host_inputs) from_sizes.push_back(input.numel()), input = input.view(-1);
      for (auto& output : outputs) to_sizes.push_back(output.numel());
      auto from = at::cat(host_inputs);
      auto to = at::empty({std::accumulate(to_sizes.begin(), to_sizes.end(), int64_t(0))}, from.options());
      auto parts = to.split_with_sizes(to_sizes);  // before gloo takes the sizes
      auto work = gloo_->alltoall_base(to, from, to_sizes, from_sizes, options);
      host_inputs.push_back(from);  // kept until the end
      return std::make_pair(Works{work}, parts);
    };
    return launch(c10d::OpType::ALLTOALL, inputs, outputs, begin);
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int rank, int tag) override {
    auto begin = [&](Tensors& inputs) { return std::make_pair(Works{gloo_->send(inputs, rank, tag)}, Tensors()); };
    return launch(c10d::OpType::SEND, tensors, {}, begin);
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int rank, int tag) override {
    auto begin = [&](Tensors& inputs) { return std::make_pair(Works{gloo_->recv(inputs, rank, tag)}, inputs); };
    return launch(c10d::OpType::RECV, tensors, tensors, begin);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    auto begin = [&](Tensors&) { return std::make_pair(Works{gloo_->barrier(options)}, Tensors()); };
    return launch(c10d::OpType::BARRIER, {}, {}, begin, 1, true);
  }

 private:
  void check_sizes(const Tensors& whole, const Tensors& parts) const {
    for (size_t i = 0; i < parts.size(); ++i)
      TORCH_CHECK(
          whole.at(i).numel() == parts[i].numel() * getSize(), "simccl: ", whole[i].numel(),
          " numbers are not those of ", getSize(), " ranks with ", parts[i].numel(), " each");
  }
  static Tensors copies(const at::Tensor& like, int count) {
    Tensors made;
    for (int i = 0; i < count; ++i) made.push_back(at::empty_like(like));
    return made;
  }
};

// DistributedDataParallel times itself with it; without one it warns.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

// ---------------------------------------------------------------- start

void start(int devices, size_t bytes, int64_t lost_after, uint64_t seed, bool has_float64) {
  TORCH_CHECK(devices <= kMostDevices, "sim: more than ", kMostDevices, " devices");
  settings = {devices, bytes, lost_after, has_float64};
  dice.seed(seed);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  pthread_atfork(
      [] { mutex.lock(); }, [] { mutex.unlock(); },
      [] {
        in_child = used;
        mutex.unlock();
      });
}

}  // namespace sim

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, ::sim::Timer);
}

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &::sim::attention_choice)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &sim::start);
  m.def("in_child", [] { return sim::in_child; });
  m.def("used", [] { return sim::used; });
  py::class_<sim::Simccl, c10d::Backend, c10::intrusive_ptr<sim::Simccl>>(m, "Simccl")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>())
      .def("perform_nocolor_split", [](sim::Simccl&, c10::Device) {});  // by ranks that are in none of the parts
  m.def("default_generator", [](int device) { return sim::default_generator(device); });
}
