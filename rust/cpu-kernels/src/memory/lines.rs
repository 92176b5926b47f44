//! Owned memory of whole cache lines, in huge pages where the system gives them. Computes nothing.

use super::{LINE_BYTES, Plain};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Size and alignment of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Least size of a [`Region`]. Pages that nothing has written take no memory.
const REGION: usize = 64 << 20;
/// A multiple of the size of all systems' small pages.
const SMALL_PAGES: usize = 64 << 10;

/// Bytes of one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u8; LINE_BYTES]);

/// Memory for several arrays, so that small ones are in huge pages, too. Reading weights in huge pages takes two thirds of
/// the time once they exceed the caches.
struct Region {
    memory: NonNull<u8>,
    size: usize,
}

// SAFETY: the memory belongs to the arrays, each of which has a part of its own.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, HUGE_PAGE).expect("a size below the address space's")
    }

    fn new(size: usize) -> Self {
        let layout = Self::layout(size);
        // SAFETY: a region is never empty.
        let Some(memory) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
        // Pages get their size when they are touched first.
        advise_huge_pages(memory, size);
        Self { memory, size }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and no array is left.
        unsafe { dealloc(self.memory.as_ptr(), Self::layout(self.size)) };
    }
}

/// The region that arrays are made in, and how much of it is given away. It lives as long as one of its arrays.
static OPEN: Mutex<(Weak<Region>, usize)> = Mutex::new((Weak::new(), 0));

/// An array in memory that it shares with others. It begins at a cache line. Its pages are given back when it is dropped.
pub(crate) struct Pages<T: Plain> {
    region: Arc<Region>,
    first: usize,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Plain> Pages<T> {
    const ALIGNED: () = assert!(align_of::<T>() <= LINE_BYTES, "arrays begin at lines");

    /// Allocates `len` zeros.
    pub(crate) fn zeroed(len: usize) -> Self {
        let () = Self::ALIGNED;
        let size = (len * size_of::<T>()).next_multiple_of(LINE_BYTES);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, first) = match open.0.upgrade() {
            Some(region) if region.size - open.1 >= size => (region, open.1),
            _ => (Arc::new(Region::new(size.next_multiple_of(HUGE_PAGE).max(REGION))), 0),
        };
        *open = (Arc::downgrade(&region), first + size);
        drop(open);
        // SAFETY: the part `first .. first + size` is in the region, and was given to no other array.
        unsafe { region.memory.add(first).write_bytes(0, size) };
        Self { region, first, len, of: PhantomData }
    }

    fn start(&self) -> NonNull<T> {
        // SAFETY: the array begins inside the region, at a line's alignment.
        unsafe { self.region.memory.add(self.first) }.cast()
    }
}

impl<T: Plain> Drop for Pages<T> {
    fn drop(&mut self) {
        let end = (self.first + self.len * size_of::<T>()) / SMALL_PAGES * SMALL_PAGES;
        let first = self.first.next_multiple_of(SMALL_PAGES);
        if first < end {
            // SAFETY: these pages of the region hold nothing but this array, whose values are read no more.
            unsafe { give_back(self.region.memory.add(first), end - first) };
        }
    }
}

impl<T: Plain> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the array's part holds `len` values, zeros or what was written, and is no other array's.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
fn advise_huge_pages(memory: NonNull<u8>, size: usize) {
    // SAFETY: the range is an allocation, and the advice changes nothing but the size of pages. If the system does not
    // take it, pages are small.
    unsafe { libc::madvise(memory.as_ptr().cast(), size, libc::MADV_HUGEPAGE) };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise_huge_pages(_: NonNull<u8>, _: usize) {}

/// Gives the memory of pages back to the system. They hold zeros or what they held.
///
/// # Safety
/// The range belongs to an allocation, and its values are read no more.
#[cfg(all(target_os = "linux", not(miri)))]
unsafe fn give_back(memory: NonNull<u8>, size: usize) {
    // SAFETY: by the caller; the range stays mapped. If the system does not take the advice, the pages stay as they are.
    unsafe { libc::madvise(memory.as_ptr().cast(), size, libc::MADV_DONTNEED) };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
unsafe fn give_back(_: NonNull<u8>, _: usize) {}
