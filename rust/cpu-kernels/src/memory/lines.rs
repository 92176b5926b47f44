//! Owned memory of whole cache lines, in huge pages where the system gives them. Computes nothing.

use super::LINE_BYTES;

/// Bytes of one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u8; LINE_BYTES]);

/// Allocates `len` lines of zeros. Reading weights in huge pages takes less time once they exceed the caches.
pub(crate) fn zeroed_lines(len: usize) -> Vec<Line> {
    let mut lines = Vec::with_capacity(len);
    // Pages get their size when they are touched first.
    advise_huge_pages(lines.as_mut_ptr(), len * LINE_BYTES);
    lines.resize(len, Line([0; LINE_BYTES]));
    lines
}

#[cfg(all(target_os = "linux", not(miri)))]
fn advise_huge_pages(memory: *mut Line, size: usize) {
    const HUGE_PAGE: usize = 2 << 20;
    let first = memory.cast::<u8>().align_offset(HUGE_PAGE);
    let Some(whole) = size.checked_sub(first).map(|rest| rest / HUGE_PAGE * HUGE_PAGE).filter(|&whole| whole > 0)
    else {
        return;
    };
    // SAFETY: the range lies in an allocation of `size` bytes, and the advice changes nothing but the size of pages. If
    // the system does not take it, pages are small.
    unsafe { libc::madvise(memory.cast::<u8>().add(first).cast(), whole, libc::MADV_HUGEPAGE) };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise_huge_pages(_: *mut Line, _: usize) {}
