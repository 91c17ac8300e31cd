//! Mean, spread and range of each feature over some rows.

/// The moments of F features.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moments {
    /// The number of rows.
    pub(crate) count: u64,
    /// `[F]`
    pub(crate) mean: Vec<f64>,
    /// The sum of squares about the mean, `[F]`.
    pub(crate) squares: Vec<f64>,
    /// `[F]`
    pub(crate) least: Vec<f32>,
    /// `[F]`
    pub(crate) greatest: Vec<f32>,
}

/// Bytes of one feature in `to_bytes`.
const FEATURE_BYTES: usize = 8 + 8 + 4 + 4;

impl Moments {
    /// Of no rows.
    pub(crate) fn none(width: usize) -> Moments {
        Moments {
            count: 0,
            mean: vec![0.0; width],
            squares: vec![0.0; width],
            least: vec![f32::INFINITY; width],
            greatest: vec![f32::NEG_INFINITY; width],
        }
    }

    /// Of these finite rows: the mean first, then squares about it, so that large numbers do not
    /// cancel.
    pub(crate) fn of_rows(x: &[f32], width: usize) -> Moments {
        let mut moments = Moments::none(width);
        let Moments {
            count,
            mean,
            squares,
            least,
            greatest,
        } = &mut moments;
        *count = (x.len() / width) as u64;
        if *count == 0 {
            return moments;
        }
        for row in x.chunks_exact(width) {
            let ends = least.iter_mut().zip(&mut *greatest);
            for ((mean, (least, greatest)), &x) in mean.iter_mut().zip(ends).zip(row) {
                *mean += f64::from(x);
                *least = if x < *least { x } else { *least };
                *greatest = if x > *greatest { x } else { *greatest };
            }
        }
        mean.iter_mut().for_each(|mean| *mean /= *count as f64);
        for row in x.chunks_exact(width) {
            for ((squares, mean), &x) in squares.iter_mut().zip(&*mean).zip(row) {
                let off = f64::from(x) - mean;
                *squares += off * off;
            }
        }
        moments
    }

    /// Adds later rows (Chan's formula).
    pub(crate) fn merge(&mut self, later: &Moments) {
        if later.count == 0 {
            return;
        }
        let (here, there) = (self.count as f64, later.count as f64);
        let part = there / (here + there);
        let own = self.mean.iter_mut().zip(&mut self.squares);
        for ((mean, squares), (later_mean, later_squares)) in
            own.zip(later.mean.iter().zip(&later.squares))
        {
            let apart = later_mean - *mean;
            *mean += apart * part;
            *squares += later_squares + apart * apart * (here * part);
        }
        for (least, &later) in self.least.iter_mut().zip(&later.least) {
            *least = least.min(later);
        }
        for (greatest, &later) in self.greatest.iter_mut().zip(&later.greatest) {
            *greatest = greatest.max(later);
        }
        self.count += later.count;
    }

    /// The length of `to_bytes`.
    pub(crate) fn bytes(width: usize) -> usize {
        8 + width * FEATURE_BYTES
    }

    /// For other ranks.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let wide = self.mean.iter().chain(&self.squares);
        let narrow = self.least.iter().chain(&self.greatest);
        let mut bytes = self.count.to_le_bytes().to_vec();
        bytes.extend(wide.flat_map(|number| number.to_le_bytes()));
        bytes.extend(narrow.flat_map(|number| number.to_le_bytes()));
        bytes
    }

    /// The opposite of `to_bytes`.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Moments> {
        let (count, rest) = bytes.split_first_chunk()?;
        let width = rest.len() / FEATURE_BYTES;
        let (wide, narrow) = rest.split_at(width * 16);
        let wide = wide.as_chunks().0.iter().copied().map(f64::from_le_bytes);
        let narrow = narrow.as_chunks().0.iter().copied().map(f32::from_le_bytes);
        Some(Moments {
            count: u64::from_le_bytes(*count),
            mean: wide.clone().take(width).collect(),
            squares: wide.skip(width).collect(),
            least: narrow.clone().take(width).collect(),
            greatest: narrow.skip(width).collect(),
        })
    }
}
