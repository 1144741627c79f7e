// A pool of the memory that torch takes on a CPU: a block that is given back is kept for the next request of about its size.
//
// glibc (before 2.38) does not find the hole again that an aligned block has left (its bug 14581), so the heap of a training
// grows to several times what the training holds, and new pages are zeroed all the time. Here sizes are rounded up to a quarter
// of a power of two, so that blocks fit again. What is kept beside what is held is given back, the longest unused first, where
// the sum would be more than 5/4 of the most that was held at once, and SPARE.

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

constexpr size_t LEAST = size_t(1) << 18;     // bytes: smaller blocks are malloc's
constexpr size_t SPARE = size_t(1) << 28;     // bytes that are kept whatever is held: passes of changing length want many sizes
constexpr size_t ALIGNED = 64, PAGE = 4096;

struct Kept {
    void* block;
    uint64_t since;
};

size_t rounded(size_t bytes) {
    const size_t part = std::bit_floor(bytes) / 4;
    return (bytes + part - 1) / part * part;
}

class Pool final : public c10::Allocator {
public:
    c10::DataPtr allocate(size_t bytes) override {
        void* block = bytes == 0 ? nullptr : bytes < LEAST ? small(bytes) : large(rounded(bytes));
        if (bytes != 0 && block == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);   // which raises torch's error
        if (block != nullptr) c10::profiledCPUMemoryReporter().New(block, bytes);
        return {block, block, &give_back, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

    void counts(int64_t* found) {
        const std::lock_guard<std::mutex> locked(mutex_);
        found[0] = held_, found[1] = kept_, found[2] = most_held_;
    }
    void empty() {
        const std::lock_guard<std::mutex> locked(mutex_);
        while (!free_.empty()) drop_oldest();
    }
    static void give_back(void* block);
    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

private:
    static void* small(size_t bytes) {
        void* block = nullptr;
        return posix_memalign(&block, ALIGNED, bytes) == 0 ? block : nullptr;
    }

    void* large(size_t bytes) {
        const std::lock_guard<std::mutex> locked(mutex_);
        void* block = nullptr;
        if (auto found = free_.lower_bound(bytes); found != free_.end() && found->first <= bytes + bytes / 4) {
            block = found->second.block, bytes = found->first;
            kept_ -= bytes;
            free_.erase(found);
        } else if ((block = mapped(bytes)) == nullptr) {
            return nullptr;
        }
        held_ += bytes;
        most_held_ = std::max(most_held_, held_);
        sizes_[block] = bytes;
        while (kept_ > 0 && held_ + kept_ > most_held_ + most_held_ / 4 + SPARE) drop_oldest();
        return block;
    }

    void* mapped(size_t bytes) {
        while (true) {
            void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (block != MAP_FAILED) return block;
            if (free_.empty()) return nullptr;
            drop_oldest();
        }
    }

    void drop_oldest() {
        auto oldest = free_.begin();
        for (auto one = free_.begin(); one != free_.end(); ++one)
            if (one->second.since < oldest->second.since) oldest = one;
        munmap(oldest->second.block, oldest->first);
        kept_ -= oldest->first;
        free_.erase(oldest);
    }

    void keep(void* block) {
        const std::lock_guard<std::mutex> locked(mutex_);
        const auto found = sizes_.find(block);
        if (found == sizes_.end()) return std::free(block);           // a small one, by chance at the beginning of a page
        free_.emplace(found->second, Kept{block, ++clock_});
        held_ -= found->second, kept_ += found->second;
        sizes_.erase(found);
    }

    std::mutex mutex_;
    std::multimap<size_t, Kept> free_;        // size -> blocks
    std::unordered_map<void*, size_t> sizes_; // of the blocks that are held
    size_t held_ = 0, kept_ = 0, most_held_ = 0;
    uint64_t clock_ = 0;
};

Pool& pool() {
    static Pool* made = new Pool;             // tensors outlive what a process destroys at its end
    return *made;
}

void Pool::give_back(void* block) {
    if (block == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(block);
    if (reinterpret_cast<uintptr_t>(block) % PAGE != 0) return std::free(block);
    pool().keep(block);
}

}  // namespace

extern "C" {

void install() {
    if (c10::GetCPUAllocator() == &pool()) return;
    c10::SetCPUAllocator(&pool(), 100);
    // a process that is forked while another thread takes memory could never take any
    pthread_atfork([] { pool().lock(); }, [] { pool().unlock(); }, [] { pool().unlock(); });
}

void empty() { pool().empty(); }

int is_installed() { return c10::GetCPUAllocator() == &pool(); }

// Bytes: held by tensors, kept for later ones, and the most that was held at once; of large blocks alone.
void counts(int64_t* found) { pool().counts(found); }

}
