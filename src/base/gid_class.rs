//! The classes of GIDs, for endpoints and errors.

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) enum GidClass {
    /// The peer sent the GID without a class.
    #[default]
    Unspecified,
    InfiniBand,
    RoceV1,
    RoceV2,
}

impl GidClass {
    pub(crate) const ALL: [Self; 4] =
        [Self::Unspecified, Self::InfiniBand, Self::RoceV1, Self::RoceV2];

    /// The number in every serialised form.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Unspecified => "GID",
            Self::InfiniBand => "InfiniBand GID",
            Self::RoceV1 => "RoCE v1 GID",
            Self::RoceV2 => "RoCE v2 GID",
        }
    }

    /// Whether packets can go between the two classes.
    pub(crate) fn fits(self, other: Self) -> bool {
        self == other || self == Self::Unspecified || other == Self::Unspecified
    }
}
