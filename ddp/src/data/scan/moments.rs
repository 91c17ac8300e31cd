//! Mean, spread and ends of each feature: of a block of rows, and of blocks put together.

/// Of each feature, over some rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moments {
    /// How many rows.
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

    /// Of these rows, which are finite: the mean first, then squares about it, so that nothing large cancels.
    pub(crate) fn of_rows(x: &[f32], width: usize) -> Moments {
        let mut moments = Moments::none(width);
        let Moments { count, mean, squares, least, greatest } = &mut moments;
        *count = (x.len() / width) as u64;
        if *count == 0 {
            return moments;
        }
        for row in x.chunks_exact(width) {
            for (((mean, least), greatest), &x) in mean.iter_mut().zip(&mut *least).zip(&mut *greatest).zip(row) {
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

    /// Adds rows that come behind (Chan's formula).
    pub(crate) fn merge(&mut self, behind: &Moments) {
        if behind.count == 0 {
            return;
        }
        let (here, there) = (self.count as f64, behind.count as f64);
        let part = there / (here + there);
        for ((mean, squares), (mean_behind, squares_behind)) in
            self.mean.iter_mut().zip(&mut self.squares).zip(behind.mean.iter().zip(&behind.squares))
        {
            let apart = mean_behind - *mean;
            *mean += apart * part;
            *squares += squares_behind + apart * apart * (here * part);
        }
        self.least.iter_mut().zip(&behind.least).for_each(|(least, &behind)| *least = least.min(behind));
        self.greatest.iter_mut().zip(&behind.greatest).for_each(|(most, &behind)| *most = most.max(behind));
        self.count += behind.count;
    }

    /// How many bytes `to_bytes` gives.
    pub(crate) fn bytes(width: usize) -> usize {
        8 + width * (8 + 8 + 4 + 4)
    }

    /// For other ranks, and for keeping.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Moments::bytes(self.mean.len()));
        bytes.extend(self.count.to_le_bytes());
        self.mean.iter().chain(&self.squares).for_each(|number| bytes.extend(number.to_le_bytes()));
        self.least.iter().chain(&self.greatest).for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes
    }

    /// What `to_bytes` gave; nothing for what it cannot have given.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Moments> {
        let (count, rest) = bytes.split_first_chunk()?;
        let width = rest.len() / (8 + 8 + 4 + 4);
        if rest.len() != Moments::bytes(width) - 8 {
            return None;
        }
        let (wide, narrow) = rest.split_at(width * 16);
        let wide: Vec<f64> = wide.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        let narrow: Vec<f32> = narrow.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Some(Moments {
            count: u64::from_le_bytes(*count),
            mean: wide[..width].to_vec(),
            squares: wide[width..].to_vec(),
            least: narrow[..width].to_vec(),
            greatest: narrow[width..].to_vec(),
        })
    }
}
