//! Splitting of one buffer among several threads into disjoint parts. Every part is handed out once.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of parts of a buffer.
pub const MAX_PARTS: usize = 256;

/// Bits of the parts that have been handed out.
#[derive(Default)]
struct Claims([AtomicU64; MAX_PARTS / 64]);

impl Claims {
    fn claim(&self, part: usize) {
        let bit = 1 << (part % 64);
        let before = self.0[part / 64].fetch_or(bit, Ordering::Relaxed);
        assert!(before & bit == 0, "part {part} of a buffer is handed out already");
    }
}

/// Panics unless bounds ascend and lie within `len`.
fn check_bounds(bounds: &[usize], len: usize) {
    assert!(bounds.is_sorted() && bounds.last().is_some_and(|&last| last <= len), "bounds {bounds:?} within {len}");
    assert!(bounds.len() <= MAX_PARTS + 1, "{} parts of a buffer, at most {MAX_PARTS}", bounds.len() - 1);
}

/// Buffer split into ranges of columns of a row-major matrix: part i has columns `bounds[i]..bounds[i + 1]` of every
/// row.
pub struct Columns<'a, T> {
    base: NonNull<T>,
    rows: usize,
    stride: usize,
    bounds: &'a [usize],
    claims: Claims,
    _buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: threads get disjoint parts, each as if by &mut.
unsafe impl<T: Send> Sync for Columns<'_, T> {}

impl<'a, T> Columns<'a, T> {
    /// Splits `buffer`, which must have at least `rows` rows of `stride` columns.
    ///
    /// # Panics
    /// If the buffer is shorter, or bounds do not ascend to at most `stride` in at most [`MAX_PARTS`] parts.
    pub fn new(buffer: &'a mut [T], rows: usize, stride: usize, bounds: &'a [usize]) -> Self {
        check_bounds(bounds, stride);
        assert!(rows * stride <= buffer.len(), "{rows} rows of {stride} in {}", buffer.len());
        let base = NonNull::from(buffer).cast();
        Self { base, rows, stride, bounds, claims: Claims::default(), _buffer: PhantomData }
    }

    /// Hands out a part.
    ///
    /// # Panics
    /// If the part was handed out before.
    pub fn take(&self, part: usize) -> ColumnsMut<'_, T> {
        let columns = self.bounds[part]..self.bounds[part + 1];
        self.claims.claim(part);
        ColumnsMut { base: self.base, rows: self.rows, stride: self.stride, columns, _buffer: PhantomData }
    }
}

/// One part of [`Columns`].
pub struct ColumnsMut<'a, T> {
    base: NonNull<T>,
    rows: usize,
    stride: usize,
    columns: Range<usize>,
    _buffer: PhantomData<&'a mut [T]>,
}

impl<T> ColumnsMut<'_, T> {
    /// Returns the range of the part's columns.
    pub fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Returns the part's columns of a row.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row is inside the buffer, whose borrow this outlives not; no other part has these columns, which
        // are handed out once; &mut self keeps this part's rows apart in time.
        unsafe {
            let start = self.base.add(row * self.stride + self.columns.start);
            std::slice::from_raw_parts_mut(start.as_ptr(), self.columns.len())
        }
    }
}

/// Buffer `[outer, middle, inner]` split by its middle index: part i has `low[i]..low[i + 1]` and `high[i]..high[i +
/// 1]`.
pub struct Planes<'a, T> {
    base: NonNull<T>,
    sizes: [usize; 3],
    low: &'a [usize],
    high: &'a [usize],
    claims: Claims,
    _buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: threads get disjoint parts, each as if by &mut.
unsafe impl<T: Send> Sync for Planes<'_, T> {}

impl<'a, T> Planes<'a, T> {
    /// Splits a buffer of `sizes`. The last of `low` must be at most the first of `high`.
    ///
    /// # Panics
    /// If the buffer is shorter, or bounds do not ascend to at most `sizes[1]` in at most [`MAX_PARTS`] parts each.
    pub fn new(buffer: &'a mut [T], sizes: [usize; 3], low: &'a [usize], high: &'a [usize]) -> Self {
        check_bounds(low, high[0]);
        check_bounds(high, sizes[1]);
        assert!(low.len() == high.len(), "bounds of {} and of {} parts", low.len() - 1, high.len() - 1);
        assert!(sizes.iter().product::<usize>() <= buffer.len(), "{sizes:?} in {}", buffer.len());
        Self { base: NonNull::from(buffer).cast(), sizes, low, high, claims: Claims::default(), _buffer: PhantomData }
    }

    /// Hands out a part.
    ///
    /// # Panics
    /// If the part was handed out before.
    pub fn take(&self, part: usize) -> PlanesMut<'_, T> {
        let middle = [self.low[part]..self.low[part + 1], self.high[part]..self.high[part + 1]];
        self.claims.claim(part);
        PlanesMut { base: self.base, sizes: self.sizes, middle, _buffer: PhantomData }
    }
}

/// One part of [`Planes`].
pub struct PlanesMut<'a, T> {
    base: NonNull<T>,
    sizes: [usize; 3],
    middle: [Range<usize>; 2],
    _buffer: PhantomData<&'a mut [T]>,
}

impl<T> PlanesMut<'_, T> {
    /// Returns the number of elements in a plane.
    pub fn inner(&self) -> usize {
        self.sizes[2]
    }

    #[inline]
    fn start(&self, outer: usize, middle: usize) -> NonNull<T> {
        assert!(
            outer < self.sizes[0] && self.middle.iter().any(|range| range.contains(&middle)),
            "[{outer}, {middle}]"
        );
        // SAFETY: within the buffer, which has at least the product of its sizes.
        unsafe { self.base.add((outer * self.sizes[1] + middle) * self.sizes[2]) }
    }

    /// Returns the plane `[inner]` of an outer index and a middle index that belongs to this part.
    #[inline]
    pub fn plane(&self, outer: usize, middle: usize) -> &[T] {
        // SAFETY: as `start`; the middle index is this part's alone, and &self keeps it from being written.
        unsafe { std::slice::from_raw_parts(self.start(outer, middle).as_ptr(), self.sizes[2]) }
    }

    /// Returns the writable plane `[inner]` of an outer index and a middle index that belongs to this part.
    #[inline]
    pub fn plane_mut(&mut self, outer: usize, middle: usize) -> &mut [T] {
        // SAFETY: as `start`; the middle index is this part's alone, and &mut self keeps it from being read.
        unsafe { std::slice::from_raw_parts_mut(self.start(outer, middle).as_ptr(), self.sizes[2]) }
    }
}
